"""The cost of a grammar to its own sequence, and to others.

    python -m bench.grammar [--model FOLDER] [--steps 200] [--choices 64]

First the time of decode steps with and without a grammar, on the same engine. At batch 1 and 8, all
sequences are either plain or constrained by a JSON schema (an array of objects that never ends).
Steps of both kinds alternate, so that drift of the machine's speed affects both alike. The figure
is the tenth percentile in microseconds, which other processes disturb least.

Then one plain sequence decodes beside the choices of a request with an ambiguous grammar, whose
masks take tenths of a second each. The figures are the longest time between two of the plain
sequence's tokens, in milliseconds, alone and beside the request, and the outcome of the request.
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
from bench.tools.records import add_record_option, keep_table
from engine.engine import Engine
from engine.engine_config import EngineConfig
from engine.loader import LoadedEngine, load_engine
from protocol.sampling import SamplingParams
from scheduling.scheduler import SchedulerConfig
from scheduling.sequence import Sequence, SequenceState

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
    parser.add_argument(
        "--choices", type=int, default=64, help="choices of the request with a slow grammar"
    )
    add_record_option(parser)
    chosen = parser.parse_args(argv)
    table = Table("batch", "plain, us", "with a grammar, us", "cost per sequence, us")
    for batch in BATCH_SIZES:
        plain, bound = measure(chosen.model, batch, chosen.steps)
        cost = (bound - plain) / batch
        table.add_row(str(batch), f"{plain:.0f}", f"{bound:.0f}", f"{cost:.0f}")
    Console().print(table)
    table = Table("beside", "longest gap, ms", "median gap, ms", "choices that ended as too slow")
    for num_choices in (0, chosen.choices):
        gaps, num_ended = gaps_beside(chosen.model, num_choices, chosen.steps)
        longest, median = f"{max(gaps) * 1e3:.1f}", f"{statistics.median(gaps) * 1e3:.2f}"
        name = f"{num_choices} choices" if num_choices else "nothing"
        table.add_row(name, longest, median, f"{num_ended} of {num_choices}")
    Console().print(table)
    keep_table(chosen.record, "grammar", table)
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


def gaps_beside(folder: Path, num_choices: int, num_steps: int) -> tuple[list[float], int]:
    """Seconds between the tokens of a plain sequence beside a request with a slow grammar, for at
    least `num_steps` steps and until the request has ended; and how many choices failed."""
    config = SchedulerConfig(BLOCK_SIZE, max_batch_size=num_choices + 1)
    num_blocks = (num_choices + 1) * 64
    loaded = load_engine(EngineConfig(folder, config, num_blocks=num_blocks), time.monotonic)
    engine, scheduler = loaded.engine, loaded.engine.scheduler
    plain = _sequence(loaded, 0, num_steps, None)
    scheduler.add(plain)
    engine.run(engine.plan())
    grammar = ambiguous_grammar()
    choices = [_sequence(loaded, 1 + i, 100, grammar, "slow") for i in range(num_choices)]
    for choice in choices:
        scheduler.add(choice)
    gaps: list[float] = []
    num_ended, num_tokens = 0, plain.num_output
    last = time.perf_counter()
    while len(gaps) < num_steps or any(not _has_ended(choice) for choice in choices):
        if _has_ended(plain):
            plain = _sequence(loaded, 0, num_steps, None)
            scheduler.add(plain)
            engine.run(engine.plan())
            num_tokens, last = plain.num_output, time.perf_counter()
        for sequence, _failure in engine.run(engine.plan()).failed:
            scheduler.finish(sequence)
            num_ended += 1
        if plain.num_output > num_tokens:
            num_tokens, now = plain.num_output, time.perf_counter()
            gaps.append(now - last)
            last = now
    loaded.grammars.close()
    return gaps, num_ended


def ambiguous_grammar(num_rules: int = 300) -> str:
    """Rules that all match any small letters and blanks, and may follow each other."""
    rules = [f"rule_number_{i}: /[a-z ]+/ x?" for i in range(num_rules)]
    choices = " | ".join(f"rule_number_{i}" for i in range(num_rules))
    return "\n".join(['start: x "#end#"', f"x: {choices}", *rules])


def _has_ended(sequence: Sequence) -> bool:
    return sequence.state is SequenceState.FINISHED


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


def _sequence(
    loaded: LoadedEngine, number: int, num_steps: int, grammar: str | None, request: str = ""
) -> Sequence:
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
        grammar=None if grammar is None else loaded.grammars.matcher(grammar, [], request),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
