"""Mooncake's traces (FAST'25): one JSON object a line, with ids of the prompt's blocks.

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


def sessions(lines: Iterable[TraceLine], rng: random.Random) -> Iterator[Session]:
    """One session for each request. Raises ConfigError, naming the line."""
    ids = BlockIds()
    rows: list[tuple[float, int, int, Runs]] = []
    for line in lines:
        start = line.number("timestamp", minimum=0) / 1000
        num_prompt = line.integer("input_length")
        num_output = max(1, line.integer("output_length", minimum=0))
        rows.append((start, num_prompt, num_output, runs_of(ids.read(line, num_prompt))))
    first = min((row[0] for row in rows), default=0.0)
    rows.sort(key=lambda row: row[0])
    times = sorted({row[0] for row in rows})
    widths = {start: later - start for start, later in pairwise(times)}
    spread = sorted(
        ((row[0] - first + rng.random() * widths.get(row[0], 0.0), row) for row in rows),
        key=lambda each: each[0],
    )
    for number, (start, (_, num_prompt, num_output, runs)) in enumerate(spread):
        blocks = BlockRuns(0, ids.block_tokens, runs)
        yield Session(f"m{number}", start, (Turn(0.0, num_prompt, num_output, blocks),))
