"""Runs planted faults and healthy loads on real fleets, and prints the score.

    python -m tests.diagnosis [--summary=FILE] [NAME ...]

A minute each. Ends with 1 unless every right cause came first, or the machine itself was starved
and the console said so. `machine` is the share of the time in which some process waited for a core:
on a machine with other work the machine may be the fault. `cpu` is the CPU time that the fleet used
until all was said. The summary is written after each case.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from protocol.errors import ServiceError
from tests.diagnosis.cases import FAULTS, HEALTHY, Case
from tests.diagnosis.judge import Outcome, Verdict, score
from tests.diagnosis.run import run


def main() -> int:
    """Run the named cases, or all; returns the exit status."""
    every = {each.name: each for each in (*FAULTS, *HEALTHY)}
    parser = argparse.ArgumentParser(prog="tests.diagnosis", description=__doc__)
    parser.add_argument("--summary", type=Path, help="write outcomes and score to this file")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(every))
    given = parser.parse_args()
    unknown = [each for each in given.names if each not in every]
    if unknown:
        parser.error(f"no case is called {', '.join(unknown)}")
    outcomes, begun = [], time.monotonic()
    for case in [each for each in every.values() if each.name in (given.names or every)]:
        outcomes.append(_run(case))
        print(outcomes[-1].row(), flush=True)
        if given.summary is not None:
            _write(given.summary, outcomes, time.monotonic() - begun)
    print(score(outcomes))
    return int(any(each.verdict not in (Verdict.RIGHT, Verdict.STARVED) for each in outcomes))


def _run(case: Case) -> Outcome:
    """Run a case; one whose fleet does not start is counted as silent, and the others go on."""
    try:
        return run(case)
    except (AssertionError, ServiceError, httpx.HTTPError) as error:
        notes = [f"{type(error).__name__}: {error}"]
        return Outcome(case.name, Verdict.SILENT, case.expected.kind, notes=notes)


def _write(path: Path, outcomes: Sequence[Outcome], seconds: float) -> None:
    cases = [each.as_json() for each in outcomes]
    summary = {"took_s": round(seconds), "score": score(outcomes).splitlines(), "cases": cases}
    path.write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
