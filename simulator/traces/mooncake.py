"""Mooncake's traces (FAST'25): one JSON object a line, with ids of the prompt's blocks, or without:
then no prompts repeat.

Requests of one timestamp were recorded in batches. They are spread over the interval up to the next
timestamp.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import pairwise

from simulator.traces.hash_ids import BlockIds
from simulator.traces.lines import TraceLine
from simulator.traces.sessions import BlockRuns, Runs, Session, Turn, runs_of

LENGTH, IDS = "input_length", "hash_ids"


def sessions(
    lines: Iterable[TraceLine], rng: random.Random, have_ids: bool = True
) -> Iterator[Session]:
    """One session for each request. Raises ConfigError, naming the line."""
    ids = BlockIds()
    rows: list[tuple[float, int, int, Runs | None]] = []
    for line in lines:
        start = line.number("timestamp", minimum=0) / 1000
        num_prompt = line.integer(LENGTH)
        num_output = max(1, line.integer("output_length", minimum=0))
        runs = runs_of(ids.read(line, num_prompt)) if have_ids else None
        rows.append((start, num_prompt, num_output, runs))
    first = min((row[0] for row in rows), default=0.0)
    rows.sort(key=lambda row: row[0])
    times = sorted({row[0] for row in rows})
    widths = {start: later - start for start, later in pairwise(times)}
    spread = sorted(
        ((row[0] - first + rng.random() * widths.get(row[0], 0.0), row) for row in rows),
        key=lambda each: each[0],
    )
    for number, (start, (_, num_prompt, num_output, runs)) in enumerate(spread):
        blocks = None if runs is None else BlockRuns(0, ids.block_tokens, runs)
        yield Session(f"m{number}", start, (Turn(0.0, num_prompt, num_output, blocks),))
