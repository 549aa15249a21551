"""Runs planted faults and healthy loads on real fleets, and prints the score.

    python -m tests.diagnosis [NAME ...]

A minute each. Ends with 1 unless every right cause came first, or the machine itself was starved
and the console said so. `machine` is the share of the time in which some process waited for a core:
on a machine with other work, faults are found later, and the machine may be the fault.
"""

from __future__ import annotations

import sys

import httpx

from protocol.errors import ServiceError
from tests.diagnosis.cases import FAULTS, HEALTHY, Case
from tests.diagnosis.judge import Outcome, Verdict, score
from tests.diagnosis.run import run


def main() -> int:
    """Run the named cases, or all; returns the exit status."""
    names = sys.argv[1:]
    outcomes: dict[bool, list[Outcome]] = {True: [], False: []}
    for is_fault, cases in ((True, FAULTS), (False, HEALTHY)):
        for case in cases:
            if not names or case.name in names:
                outcome = _run(case)
                outcomes[is_fault].append(outcome)
                print(outcome.row(), flush=True)
    print(score(outcomes[True], outcomes[False]))
    every = [*outcomes[True], *outcomes[False]]
    return int(any(each.verdict not in (Verdict.RIGHT, Verdict.STARVED) for each in every))


def _run(case: Case) -> Outcome:
    """Run a case; one whose fleet does not start is counted as silent, and the others go on."""
    try:
        return run(case)
    except (AssertionError, ServiceError, httpx.HTTPError) as error:
        return Outcome(case.name, Verdict.SILENT, notes=[f"{type(error).__name__}: {error}"])


if __name__ == "__main__":
    sys.exit(main())
