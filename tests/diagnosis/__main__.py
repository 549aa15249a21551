"""Runs planted faults and healthy loads on real fleets, and prints the score.

    python -m tests.diagnosis [NAME ...]

A minute each. `machine` is the share of the time in which some process waited for a core: on a
machine with other work, faults are found later, and the machine may be the fault.
"""

from __future__ import annotations

import sys

from tests.diagnosis.cases import FAULTS, HEALTHY
from tests.diagnosis.judge import Outcome, score
from tests.diagnosis.run import run


def main() -> None:
    """Run the named cases, or all."""
    names = sys.argv[1:]
    outcomes: dict[bool, list[Outcome]] = {True: [], False: []}
    for is_fault, cases in ((True, FAULTS), (False, HEALTHY)):
        for case in cases:
            if not names or case.name in names:
                outcome = run(case)
                outcomes[is_fault].append(outcome)
                print(outcome.row(), flush=True)
    print(score(outcomes[True], outcomes[False]))


if __name__ == "__main__":
    main()
