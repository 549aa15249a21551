"""Fuzzing of every parser of remote input: only declared errors come out, and nothing grows.

    python -m bench.fuzz --inputs 1000000 --seed 1

The inputs are shared out evenly; the same seed gives the same ones. Memory is that of this
process, after the first tenth of a parser's inputs and after the last. A leak shows in every tenth,
where code that a rare input loads shows in one: growth is nine times the median of the nine tenths.
Exits with 1 unless nothing unexpected was raised and growth is below 2 % with each parser.
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

from bench.reliability.fuzz_inputs import Mutator
from bench.reliability.fuzz_parsers import Parser, parsers

MAX_GROWTH = 0.02
NUM_PARTS = 10
_SHOWN = 5


@dataclass
class Outcome:
    """What one parser made of its inputs; `memory` is that of this process after each part."""

    name: str
    accepted: int = 0
    refused: int = 0
    unexpected: int = 0
    memory: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def gained(self) -> float:
        """From the end of the first part to the end of the last, as a part of the memory."""
        return self.memory[-1] / self.memory[0] - 1

    @property
    def growth(self) -> float:
        """What most parts add, over all of them."""
        added = [after - before for before, after in pairwise(self.memory)]
        return statistics.median(added) * len(added) / self.memory[0]

    @property
    def is_clean(self) -> bool:
        """Whether only declared errors came, and memory stayed."""
        return not self.unexpected and self.growth < MAX_GROWTH


class Fuzzing:
    """Feeds parsers; keeps the first inputs that raised what they must not."""

    def __init__(self, seed: int) -> None:
        self.findings: list[tuple[str, bytes, Exception]] = []
        self._seed = seed

    def run(self, parser: Parser, num_inputs: int) -> Outcome:
        """So many inputs for one parser."""
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
        except Exception as error:  # noqa: BLE001 - what is looked for
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
    """Run, print the table and what was found; 0 if nothing was."""
    cli = argparse.ArgumentParser(prog="python -m bench.fuzz", description=__doc__)
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
    """Bytes, without what is free but not given back yet."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
