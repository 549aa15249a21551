"""Mooncake's traces (FAST'25): one JSON object a line, with ids of the prompt's 512-token blocks.

Requests of one timestamp were recorded in batches. They are spread over the interval up to the next
timestamp.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import pairwise

from simulator.traces.lines import TraceLine
from simulator.traces.sessions import BlockRuns, Session, Turn, runs_of

BLOCK_TOKENS = 512


def sessions(lines: Iterable[TraceLine], rng: random.Random) -> Iterator[Session]:
    """One session for each request. Raises ConfigError, naming the line."""
    rows = []
    for line in lines:
        start = line.number("timestamp", minimum=0) / 1000
        ids = line.integers("hash_ids")
        num_prompt = line.integer("input_length")
        num_output = line.integer("output_length")
        if len(ids) != -(-num_prompt // BLOCK_TOKENS):
            raise line.wrong("hash_ids", f"one id for every {BLOCK_TOKENS} tokens of the prompt")
        rows.append(
            (start, Turn(0.0, num_prompt, num_output, BlockRuns(0, BLOCK_TOKENS, runs_of(ids))))
        )
    rows.sort(key=lambda row: row[0])
    times = sorted({start for start, _ in rows})
    widths = {start: later - start for start, later in pairwise(times)}
    spread = sorted(
        ((start + rng.random() * widths.get(start, 0.0), turn) for start, turn in rows),
        key=lambda row: row[0],
    )
    for number, (start, turn) in enumerate(spread):
        yield Session(f"m{number}", start, (turn,))
