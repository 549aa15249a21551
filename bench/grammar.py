"""The cost of a grammar: time of decode steps with and without one, on the same engine.

    python -m bench.grammar [--model FOLDER] [--steps 200]

At batch 1 and 8, all sequences are either plain or constrained by a JSON schema (an array of
objects that never ends). Steps of both kinds alternate, so that drift of the machine's speed
affects both alike. The figure is the tenth percentile in microseconds, which other processes
disturb least.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence as Seq
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.tools.paths import DEMO_MODEL
from engine.engine import Engine
from engine.loader import EngineConfig, LoadedEngine, load_engine
from protocol.sampling import SamplingParams
from scheduling.scheduler import SchedulerConfig
from scheduling.sequence import Sequence

BATCH_SIZES = (1, 8)
BLOCK_SIZE = 16
PROMPT = 64
GRAMMAR = """start: %json {"type": "array", "minItems": 1000, "items": {"type": "object",
"properties": {"name": {"type": "string", "maxLength": 20}, "size": {"type": "integer"}},
"required": ["name", "size"], "additionalProperties": false},
"x-guidance": {"whitespace_flexible": false}}"""


def main(argv: Seq[str]) -> int:
    """Measure and print; 0."""
    parser = argparse.ArgumentParser(prog="bench.grammar", description=__doc__)
    default = DEMO_MODEL
    parser.add_argument("--model", type=Path, default=default, help="a checkpoint's folder")
    parser.add_argument("--steps", type=int, default=200, help="decode steps of each kind")
    chosen = parser.parse_args(argv)
    table = Table("batch", "plain, us", "with a grammar, us", "cost per sequence, us")
    for batch in BATCH_SIZES:
        plain, bound = measure(chosen.model, batch, chosen.steps)
        cost = (bound - plain) / batch
        table.add_row(str(batch), f"{plain:.0f}", f"{bound:.0f}", f"{cost:.0f}")
    Console().print(table)
    return 0


def measure(folder: Path, batch: int, num_steps: int) -> tuple[float, float]:
    """Microseconds of an undisturbed step without and with grammars."""
    kinds = [_decoding(folder, batch, num_steps, grammar) for grammar in (None, GRAMMAR)]
    times: list[list[float]] = [[], []]
    for _ in range(num_steps):
        for engine, taken in zip(kinds, times, strict=True):
            started = time.perf_counter()
            engine.run(engine.plan())
            taken.append((time.perf_counter() - started) * 1e6)
    plain, bound = (statistics.quantiles(each, n=10)[0] for each in times)
    return plain, bound


def _decoding(folder: Path, batch: int, num_steps: int, grammar: str | None) -> Engine:
    """An engine on which `batch` sequences have their first token."""
    longest = PROMPT + 2 * num_steps
    num_blocks = batch * (longest // BLOCK_SIZE + 2)
    config = SchedulerConfig(BLOCK_SIZE, max_batch_size=batch)
    loaded = load_engine(EngineConfig(folder, config, num_blocks=num_blocks), time.monotonic)
    for number in range(batch):
        loaded.engine.scheduler.add(_sequence(loaded, number, num_steps, grammar))
    sequences = loaded.engine.scheduler.sequences
    while any(sequence.num_output == 0 for sequence in sequences):
        loaded.engine.run(loaded.engine.plan())
    return loaded.engine


def _sequence(loaded: LoadedEngine, number: int, num_steps: int, grammar: str | None) -> Sequence:
    vocab_size = loaded.engine.limits.vocab_size
    return Sequence(
        request_id=str(number),
        attempt=0,
        tokens=[(number + i) % vocab_size for i in range(PROMPT)],
        num_prompt=PROMPT,
        sampling=SamplingParams(max_tokens=2 * num_steps, seed=number, grammar=grammar),
        root_hash=b"bench",
        block_size=BLOCK_SIZE,
        arrival=0.0,
        deadline=float("inf"),
        grammar=None if grammar is None else loaded.grammars.matcher(grammar, []),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
