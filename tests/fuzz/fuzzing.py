"""Fuzzes every parser of remote input: it may raise only declared errors, and memory must not grow.

    python -m tests.fuzz --inputs 1000000 --seed 1

The inputs are divided evenly among the parsers; the same seed gives the same inputs. This process's
memory is measured after each tenth of a parser's inputs. A leak shows in every tenth, code loaded
by a rare input in one only: growth is nine times the median growth of the last nine tenths. Exits
with 1 if a parser raised an unexpected error or its growth was 2 % or more.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import logging
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise

import psutil
from rich.console import Console
from rich.table import Table

from tests.fuzz.inputs import Mutator
from tests.fuzz.parsers import Parser, parsers

MAX_GROWTH = 0.02
NUM_PARTS = 10
_SHOWN = 5


@dataclass
class Outcome:
    """One parser's results; `memory` is this process's resident memory after each part, bytes."""

    name: str
    accepted: int = 0
    refused: int = 0
    unexpected: int = 0
    memory: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def gained(self) -> float:
        """Relative growth of memory from the end of the first part to the end of the last."""
        return self.memory[-1] / self.memory[0] - 1

    @property
    def growth(self) -> float:
        """The median growth per part times the number of parts, relative to the memory."""
        added = [after - before for before, after in pairwise(self.memory)]
        return statistics.median(added) * len(added) / self.memory[0]

    @property
    def is_clean(self) -> bool:
        """Whether only declared errors were raised and memory did not grow."""
        return not self.unexpected and self.growth < MAX_GROWTH


class Fuzzing:
    """Feeds parsers; keeps the first inputs that raised undeclared errors."""

    def __init__(self, seed: int) -> None:
        self.findings: list[tuple[str, bytes, Exception]] = []
        self._seed = seed

    def run(self, parser: Parser, num_inputs: int) -> Outcome:
        """Feed `num_inputs` inputs to one parser."""
        mutator = Mutator(random.Random(f"{self._seed} {parser.name}"), parser.codec, parser.seeds)
        outcome = Outcome(parser.name)
        started = time.perf_counter()
        for part in range(NUM_PARTS):
            for _ in range((num_inputs + part) // NUM_PARTS):
                self._feed(parser, mutator.next(), outcome)
            outcome.memory.append(_resident())
        outcome.seconds = time.perf_counter() - started
        return outcome

    def _feed(self, parser: Parser, data: bytes, outcome: Outcome) -> None:
        try:
            parser.parse(data)
        except parser.errors:
            outcome.refused += 1
        except Exception as error:  # noqa: BLE001 - such errors are the findings
            outcome.unexpected += 1
            if len(self.findings) < _SHOWN:
                self.findings.append((parser.name, data, error))
        else:
            outcome.accepted += 1


def report(outcomes: list[Outcome], seed: int) -> Table:
    """The figures as a table."""
    table = Table(title=f"fuzzing, seed {seed}")
    for column in (
        "parser",
        "inputs",
        "accepted",
        "refused",
        "unexpected",
        "gained",
        "growth",
        "s",
    ):
        table.add_column(column, justify="left" if column == "parser" else "right")
    for each in outcomes:
        counts = (each.accepted, each.refused, each.unexpected)
        cells = [f"{count:,}" for count in (sum(counts), *counts)]
        cells += [f"{each.gained:+.2%}", f"{each.growth:+.2%}", f"{each.seconds:.0f}"]
        table.add_row(each.name, *cells)
    return table


def main(argv: list[str]) -> int:
    """Run and print the table and the findings; 0 if every parser is clean."""
    cli = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    cli.add_argument("--inputs", type=int, default=1_000_000)
    cli.add_argument("--seed", type=int, default=1)
    arguments = cli.parse_args(argv)
    logging.disable(logging.CRITICAL)
    loop = asyncio.new_event_loop()
    try:
        fuzzing = Fuzzing(arguments.seed)
        known = parsers(loop)
        shares = [(arguments.inputs + i) // len(known) for i in range(len(known))]
        outcomes = [fuzzing.run(*each) for each in zip(known, shares, strict=True)]
    finally:
        loop.close()
        logging.disable(logging.NOTSET)
    console = Console(soft_wrap=True)
    console.print(report(outcomes, arguments.seed))
    for name, data, error in fuzzing.findings:
        console.print(f"{name}: {error!r} of {data[:300]!r}", markup=False)
    return 0 if all(each.is_clean for each in outcomes) else 1


def _resident() -> int:
    """Resident bytes, after returning free memory to the system."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
