"""The console tells the truth: every planted fault is named, and nothing harmful is advised."""

from __future__ import annotations

import pytest

from tests.diagnosis.cases import FAULTS, HEALTHY, Case
from tests.diagnosis.judge import Verdict
from tests.diagnosis.run import run
from tests.programs import find_program

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module", autouse=True)
def prometheus() -> None:
    find_program("prometheus", "prometheus")


@pytest.mark.parametrize("case", [*FAULTS, *HEALTHY], ids=lambda each: each.name)
def test_the_right_cause_comes_first_and_nothing_else(case: Case) -> None:
    outcome = run(case)
    print(outcome.row())
    if outcome.verdict is Verdict.STARVED:
        pytest.skip("the machine itself was starved of CPU, which the console said")
    assert outcome.verdict is Verdict.RIGHT
