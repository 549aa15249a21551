"""A prefill engine in pipeline stages on this host: how long stages wait for one another.

    python -m bench.stages [--model M1] [--stages 2] [--prompts 24] [--turns 3]
                           [--trace FILE [--shrink 2]]

Prompts of mixed lengths, or those of a recorded trace, are computed as whole prompts, in chunks of
equal tokens, and in chunks of equal predicted time, with a step in each stage. Shows tokens per
second and the bubble share, which is the part of their time that stages do not compute while steps
are under way. Then one prompt runs on an idle engine: its time to the first token beside the sum of
its stages' computing. Exits with 1 if that is more than 1.3 times as long.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.replay.smaller_traces import shrunk
from bench.tools.checkpoints import SHAPES, add_tokenizer, benchmark_checkpoint
from bench.tools.records import add_record_option, keep_table
from engine.engine_config import EngineConfig
from engine.loader import LoadedEngine, load_engine
from process.cores import usable_cores
from protocol.errors import BatonError
from protocol.layout import PAIRS
from protocol.sampling import SamplingParams
from scheduling.scheduler import SchedulerConfig
from scheduling.sequence import Sequence
from simulator.traces.files import TraceOptions, read_trace
from worker.ranks.head import Hands
from worker.ranks.processes import HandSettings

BLOCK, CHUNK, LONGEST = 16, 256, 2048
LENGTHS = (64, 128, 256, 512, 1024, LONGEST)
MOST_TTFT = 1.3
SILENCE_S = 30.0
"""How long a step waits for a rank."""


@dataclass(frozen=True)
class Way:
    """How prompts are cut into steps."""

    label: str
    chunk: int
    is_even: bool = False


Lengths = Callable[[int, random.Random], list[int]]
"""Draws the lengths of so many prompts, in tokens."""

WAYS = (
    Way("whole prompts", LONGEST),
    Way("equal tokens", CHUNK),
    Way("equal time", CHUNK, is_even=True),
)


def main(argv: list[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.stages", description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="M1")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--trace", help="take the prompts' lengths from it, as of `baton simulate`")
    parser.add_argument("--shrink", type=int, default=1, help="divides the trace's lengths")
    add_record_option(parser)
    options = parser.parse_args(argv)
    folder = benchmark_checkpoint(options.model)
    add_tokenizer(folder)
    try:
        draw = mixed_lengths if options.trace is None else recorded(options.trace, options.shrink)
        with staged_engine(folder, options.stages) as loaded:
            run = StagedRun(loaded, options.stages, draw)
            table = measure(run, options.prompts, options.turns)
            ratio = statistics.median(run.alone() for _ in range(options.turns))
    except BatonError as error:
        print(f"bench.stages: {error}", file=sys.stderr)
        return 1
    Console().print(table)
    load = "" if options.trace is None else f" {Path(options.trace).stem}"
    keep_table(options.record, f"stages {options.model}{load}", table)
    print(f"one prompt of {LONGEST:,} tokens takes {ratio:.2f} times the sum of its stages")
    return int(ratio > MOST_TTFT)


def mixed_lengths(num_prompts: int, rng: random.Random) -> list[int]:
    """Lengths of prompts, short and long ones equally often."""
    return [rng.choice(LENGTHS) for _ in range(num_prompts)]


def recorded(trace: str, divisor: int) -> Lengths:
    """Draws consecutive prompts of a trace, their lengths divided by `divisor` and cut to the
    longest one. Raises ConfigError if it cannot be read."""
    sessions = shrunk(read_trace(trace, TraceOptions()), divisor).sessions
    found = [min(LONGEST, turn.num_prompt) for each in sessions for turn in each.turns]

    def draw(num_prompts: int, rng: random.Random) -> list[int]:
        first = rng.randrange(max(1, len(found) - num_prompts + 1))
        return found[first : first + num_prompts]

    return draw


def measure(run: StagedRun, num_prompts: int, turns: int) -> Table:
    """A row for each way to cut prompts into steps."""
    found: dict[Way, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for turn in range(1 + turns):
        for way in WAYS:
            measured = run.mix(way, num_prompts, random.Random(turn))
            if turn:  # the first warms up
                found[way].append(measured)
    table = Table("steps", "tokens/s", "bubbles")
    for way, figures in found.items():
        rates, bubbles = zip(*figures, strict=True)
        table.add_row(
            way.label, f"{statistics.median(rates):,.0f}", f"{statistics.median(bubbles):.0%}"
        )
    return table


class StagedRun:
    """Prompts on an engine in `num_stages` stages."""

    def __init__(self, loaded: LoadedEngine, num_stages: int, draw: Lengths) -> None:
        self._draw = draw
        self._engine = loaded.engine
        self._vocab = loaded.config.vocab_size
        self._num_stages = num_stages
        self._count = 0

    def mix(self, way: Way, num_prompts: int, rng: random.Random) -> tuple[float, float]:
        """Tokens per second of prompts that are all there from the start, and the bubble share."""
        self._take(way, self._num_stages)
        lengths = self._draw(num_prompts, rng)
        seconds, busy_s, under_way_s = self._compute(lengths, rng)
        return sum(lengths) / seconds, 1 - busy_s / (self._num_stages * under_way_s)

    def alone(self) -> float:
        """The time to the first token of a single long prompt, divided by the time for which its
        stages compute."""
        self._take(Way("", LONGEST), self._num_stages)
        seconds, busy_s, _ = self._compute([LONGEST], random.Random(0))
        return seconds / busy_s

    def _take(self, way: Way, num_stages: int) -> None:
        scheduler = self._engine.scheduler
        scheduler.config = replace(
            scheduler.config, chunk_max_tokens=way.chunk, even_steps=way.is_even
        )
        self._engine.run_ahead(num_stages - 1, num_stages)

    def _compute(self, lengths: list[int], rng: random.Random) -> tuple[float, float, float]:
        """The seconds that these prompts take, those that stages compute in all, and those for
        which steps are under way."""
        engine = self._engine
        for length in lengths:
            self._add(length, rng)
        busy_us, under_way_s = self._busy_us(), engine.under_way_s
        started = time.perf_counter()
        while engine.scheduler.has_work or engine.is_ahead:
            result = engine.run(engine.plan())
            for produced in result.produced:
                engine.scheduler.release_blocks(produced.sequence)
        seconds = time.perf_counter() - started
        engine.scheduler.blocks.clear_cache()
        return seconds, (self._busy_us() - busy_us) / 1e6, engine.under_way_s - under_way_s

    def _busy_us(self) -> int:
        return sum(each.busy_us for each in self._engine.rank_times())

    def _add(self, length: int, rng: random.Random) -> None:
        self._count += 1
        self._engine.scheduler.add(
            Sequence(
                request_id=f"prompt-{self._count}",
                attempt=0,
                tokens=[rng.randrange(self._vocab) for _ in range(length)],
                num_prompt=length,
                sampling=SamplingParams(max_tokens=1, seed=0, temperature=0.0),
                root_hash=b"bench",
                block_size=BLOCK,
                arrival=0.0,
                deadline=float("inf"),
                prefill_only=True,
            )
        )


@contextmanager
def staged_engine(folder: Path, num_stages: int) -> Iterator[LoadedEngine]:
    """An engine whose stages share out the cores, one thread or more each; ended at the end."""

    def lost(reason: str) -> None:
        print(f"bench.stages: {reason}", file=sys.stderr)

    limits = SchedulerConfig(BLOCK, max_batch_size=8, chunk_max_tokens=LONGEST)
    config = EngineConfig(
        folder,
        limits,
        "bfloat16",
        "cpu",
        num_blocks=2 * limits.max_batch_size * LONGEST // BLOCK,
        kv_order=PAIRS,
    )
    threads = max(1, len(usable_cores()) // num_stages)
    torch.set_num_threads(threads)
    settings = HandSettings(config, 1, threads, "warning", "text", "bench", num_stages)
    hands = Hands(settings, lost, SILENCE_S)

    def allocate(num_bytes: int) -> memoryview | None:
        return hands.allocate(num_bytes, lambda size: None)

    try:
        yield load_engine(config, time.perf_counter, allocate, ranks=hands.ranks)
    finally:
        hands.close()


if __name__ == "__main__":
    sys.exit(main())
