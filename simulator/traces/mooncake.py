"""Mooncake's traces (FAST'25): one JSON object a line, with ids of the prompt's 512-token blocks.

Requests of one timestamp were recorded in batches. They are spread over the interval up to the next
timestamp.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import pairwise

from simulator.traces.lines import MAX_ID, TraceLine
from simulator.traces.sessions import BlockRuns, Session, Turn, runs_of

BLOCK_TOKENS = 512


def sessions(lines: Iterable[TraceLine], rng: random.Random) -> Iterator[Session]:
    """One session for each request. Raises ConfigError, naming the line."""
    rows: list[tuple[float, Turn]] = []
    wide: dict[int, int] = {}
    for line in lines:
        start = line.number("timestamp", minimum=0) / 1000
        ids = _ids(line, wide)
        num_prompt = line.integer("input_length")
        num_output = max(1, line.integer("output_length", minimum=0))
        if len(ids) != -(-num_prompt // BLOCK_TOKENS):
            raise line.wrong("hash_ids", f"one id for every {BLOCK_TOKENS} tokens of the prompt")
        rows.append(
            (start, Turn(0.0, num_prompt, num_output, BlockRuns(0, BLOCK_TOKENS, runs_of(ids))))
        )
    first = min((start for start, _ in rows), default=0.0)
    rows = sorted(((start - first, turn) for start, turn in rows), key=lambda row: row[0])
    times = sorted({start for start, _ in rows})
    widths = {start: later - start for start, later in pairwise(times)}
    spread = sorted(
        ((start + rng.random() * widths.get(start, 0.0), turn) for start, turn in rows),
        key=lambda row: row[0],
    )
    for number, (start, turn) in enumerate(spread):
        yield Session(f"m{number}", start, (turn,))


def _ids(line: TraceLine, wide: dict[int, int]) -> list[int]:
    """The ids of the prompt's blocks; hashes of 64 bits get numbers, which `wide` remembers."""
    found = line.integers("hash_ids")
    if len(set(found)) != len(found):
        raise line.wrong("hash_ids", "different ids, each of one block behind those before it")
    return [
        each if 0 <= each < MAX_ID else MAX_ID + wide.setdefault(each, len(wide)) for each in found
    ]
