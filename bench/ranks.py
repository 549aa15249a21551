"""Compares a model on several ranks of this host with one rank of as many threads.

    python -m bench.ranks [--model M1] [--ranks 2] [--turns 3]

Both engines have the same cores: the ranks share them out, one thread or more each. They take turns
in one process, and a figure is the median of the turns' ratios. Also measures what the head spends
to announce a step. Exits with 1 if several ranks reach less than 0.8 of one, or if a step takes
more than 50 us to announce.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.engine.in_process import BatonRun, EngineKind, engine_config
from bench.engine.workloads import BATCH_SIZES, CONTEXT, PREFILL_LENGTHS, Work
from bench.tools.checkpoints import SHAPES, add_tokenizer, benchmark_checkpoint
from bench.tools.records import add_record_option, keep_table
from engine.engine_config import EngineConfig
from engine.loader import load_engine
from engine.parallel.ranks import Ranks, Step
from process.cores import usable_cores
from protocol.errors import BatonError
from protocol.layout import PAIRS
from worker.ranks.head import Hands
from worker.ranks.processes import HandSettings

LEAST, MOST_US = 0.8, 50.0
SILENCE_S = 30.0
"""How long a step waits for a rank."""
WORKS = [Work("decode", batch, CONTEXT) for batch in BATCH_SIZES]
WORKS.append(Work("prefill", 1, max(PREFILL_LENGTHS)))


def main(argv: list[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(prog="bench.ranks", description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=SHAPES, default="M1")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    add_record_option(parser)
    options = parser.parse_args(argv)
    folder = benchmark_checkpoint(options.model)
    add_tokenizer(folder)
    try:
        ratios, announced_us = measure(folder, options.ranks, options.turns)
    except BatonError as error:
        print(f"bench.ranks: {error}", file=sys.stderr)
        return 1
    table = Table("work", "one rank, tokens/s", f"{options.ranks} ranks, tokens/s", "ratio")
    for work, (alone, split) in ratios.items():
        ratio = statistics.median(b / a for a, b in zip(alone, split, strict=True))
        table.add_row(
            work.label,
            f"{statistics.median(alone):,.0f}",
            f"{statistics.median(split):,.0f}",
            f"{ratio:.2f}",
        )
    Console().print(table)
    keep_table(options.record, f"ranks {options.model}", table)
    median_us = statistics.median(announced_us)
    print(f"a step is announced in {median_us:.0f} us (median of {len(announced_us)})")
    worst = min(
        statistics.median(b / a for a, b in zip(*rates, strict=True)) for rates in ratios.values()
    )
    return int(worst < LEAST or median_us > MOST_US)


def measure(
    folder: Path, num_ranks: int, turns: int
) -> tuple[dict[Work, tuple[list[float], list[float]]], list[float]]:
    """Tokens per second of one rank and of several, turn by turn; and the microseconds of each
    announcement."""
    num_cores = len(usable_cores())
    threads = max(1, num_cores // num_ranks)
    config = engine_config(folder, "bfloat16", "cpu", EngineKind(), WORKS)
    found: dict[Work, tuple[list[float], list[float]]] = {work: ([], []) for work in WORKS}
    with hands(replace(config, kv_order=PAIRS), num_ranks, threads) as group:
        alone = BatonRun(load_engine(config, time.perf_counter))

        def allocate(num_bytes: int) -> memoryview | None:
            return group.allocate(num_bytes, lambda size: None)

        ranked = replace(config, kv_order=PAIRS)
        split = BatonRun(load_engine(ranked, time.perf_counter, allocate, ranks=group.ranks))
        with timed_announcements() as announced_us:
            for turn in range(1 + turns):
                for work in WORKS:
                    for side, (run, number) in enumerate(((alone, num_cores), (split, threads))):
                        torch.set_num_threads(number)
                        rate = run.measure(work, random.Random(turn))
                        if turn:  # the first warms up
                            found[work][side].append(rate)
    return found, announced_us


@contextmanager
def hands(config: EngineConfig, num_ranks: int, threads: int) -> Iterator[Hands]:
    """The other ranks, ended at the end."""

    def lost(reason: str) -> None:
        print(f"bench.ranks: {reason}", file=sys.stderr)

    settings = HandSettings(config, num_ranks, threads, "warning", "text", "bench")
    group = Hands(settings, lost, SILENCE_S)
    try:
        yield group
    finally:
        group.close()


@contextmanager
def timed_announcements() -> Iterator[list[float]]:
    """Microseconds of each step's announcement while the context lasts."""
    announce = Ranks.announce
    taken_us: list[float] = []

    def timed(ranks: Ranks, step: Step | None) -> None:
        started = time.perf_counter()
        announce(ranks, step)
        taken_us.append(1e6 * (time.perf_counter() - started))

    setattr(Ranks, "announce", timed)  # noqa: B010 - a type checker knows no other way
    try:
        yield taken_us
    finally:
        setattr(Ranks, "announce", announce)  # noqa: B010


if __name__ == "__main__":
    sys.exit(main())
