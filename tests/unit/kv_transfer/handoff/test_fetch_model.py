"""The model of fetches is safe and ends, and every rule that is wrong on purpose still fails."""

from __future__ import annotations

import pytest

from tests.effort import NIGHTLY
from tests.specification.fetch_model import Fleet, Rules, check, small_rows, wrong_rows

QUICK = (
    "no deadlines: fetches both ways",
    "fetches both ways, 2 and 3 requests",
    "no deadlines: a cache is taken over",
)


@pytest.mark.parametrize(
    ("rules", "wanted", "fleets"),
    [
        pytest.param(*row[1:], id=row[0])
        for row in [*wrong_rows(), *[row for row in small_rows() if NIGHTLY or row[0] in QUICK]]
    ],
)
def test_fetches(rules: Rules, wanted: str, fleets: list[Fleet]) -> None:
    assert fleets
    for fleet in fleets:
        verdict, _, trace = check(fleet, rules, reduces=len(fleets) > 1)
        assert verdict.startswith(wanted), (fleet, trace)
