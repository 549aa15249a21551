"""The protocol's model is safe and ends, and every rule that is wrong on purpose still fails."""

from __future__ import annotations

import pytest

from tests.effort import NIGHTLY
from tests.specification.handoff_model import Fleet, Rules, check, rows


@pytest.mark.parametrize(
    ("rules", "wanted", "fleets"),
    [pytest.param(*row[1:], id=row[0]) for row in rows(is_quick=not NIGHTLY)],
)
def test_the_protocol(rules: Rules, wanted: str, fleets: list[Fleet]) -> None:
    assert fleets
    for fleet in fleets:
        verdict, _, trace = check(fleet, rules)
        assert verdict.startswith(wanted), (fleet, trace)
