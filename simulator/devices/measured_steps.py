"""Step times from measurements: coefficients, as a worker's step model learns and reports them, or
tables of timed steps.

By coefficients a step takes `fixed + per_token * tokens + per_attended * attended pairs`, as in
`scheduling.step_model`. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from checkpoint.json_keys import JsonKeys
from simulator.devices.step_times import ChunkWork, StepTimes


@dataclass(frozen=True)
class MeasuredSteps:
    """The coefficients, in seconds."""

    fixed_s: float
    per_token_s: float
    per_attended_s: float

    def decode_line(self, num_rows: int) -> tuple[float, float]:
        """See `StepTimes`."""
        return self.fixed_s + self.per_token_s * num_rows, self.per_attended_s

    def seconds(self, num_rows: int, context: int, chunks: ChunkWork) -> float:
        """See `StepTimes`."""
        fixed, slope = self.decode_line(num_rows + chunks.num_tokens)
        return fixed + slope * (context + chunks.pairs)


Table = tuple[tuple[int, float], ...]
"""Pairs of a rising number and seconds; linear between and beyond the entries."""


@dataclass(frozen=True)
class TabledSteps:
    """Timed steps, in seconds, without attention: `decodes` by the number of sequences that decode,
    `chunks` by the number of prompt tokens, in a step that outputs no token. Attention adds
    `per_context_s` for each token that a decode reads, `per_pair_s` for each query and key of
    chunks."""

    decodes: Table
    chunks: Table
    per_context_s: float
    per_pair_s: float
    _known: dict[tuple[int, int], float] = field(default_factory=dict, init=False, compare=False)

    def decode_line(self, num_rows: int) -> tuple[float, float]:
        """See `StepTimes`."""
        return self._fixed(num_rows, 0), self.per_context_s

    def seconds(self, num_rows: int, context: int, chunks: ChunkWork) -> float:
        """See `StepTimes`."""
        fixed = self._fixed(num_rows, chunks.num_tokens)
        return fixed + self.per_context_s * context + self.per_pair_s * chunks.pairs

    def _fixed(self, num_rows: int, num_tokens: int) -> float:
        """Seconds of a step without attention. Beside chunks, each decode costs as much as a prompt
        token, plus the output matrix: the difference between a step of decodes and one of as many
        prompt tokens."""
        known = self._known.get((num_rows, num_tokens))
        if known is None:
            known = table_value(self.decodes, num_rows)
            if num_tokens:
                known -= table_value(self.chunks, num_rows) if num_rows else known
                known = max(0.0, known) + table_value(self.chunks, num_rows + num_tokens)
            self._known[num_rows, num_tokens] = known
        return known


def table_value(table: Table, number: float) -> float:
    """The seconds at a number; never less than 0."""
    if len(table) == 1:
        return table[0][1]
    right = min(max(1, bisect_right(table, (number, 0.0))), len(table) - 1)
    (low, before), (high, after) = table[right - 1], table[right]
    return max(0.0, before + (after - before) * (number - low) / (high - low))


def read_steps(keys: JsonKeys) -> StepTimes:
    """The step times in a file, which has microseconds. Raises ModelLoadError."""
    if "decodes_us" in keys or "chunks_us" in keys:
        per_context, per_pair = (
            keys.number(name, above=-1e-12) / 1e6 for name in ("per_context_us", "per_pair_us")
        )
        return TabledSteps(
            _table(keys, "decodes_us"), _table(keys, "chunks_us"), per_context, per_pair
        )
    fixed, token, attended = (
        keys.number(name) / 1e6 for name in ("fixed_us", "per_token_us", "per_attended_us")
    )
    return MeasuredSteps(fixed, token, attended)


def _table(keys: JsonKeys, name: str) -> Table:
    value = keys.raw(name)
    rows = value if isinstance(value, list) else []
    if not rows or not all(map(_is_row, rows)) or not _rises([row[0] for row in rows]):
        raise keys.wrong(name, "a list of pairs [number, microseconds] whose numbers rise")
    return tuple((number, took_us / 1e6) for number, took_us in rows)


def _is_row(row: object) -> bool:
    if not isinstance(row, list) or len(row) != 2:
        return False
    number, took_us = row
    are_numbers = isinstance(number, int) and isinstance(took_us, (int, float))
    are_numbers = are_numbers and not isinstance(number, bool) and not isinstance(took_us, bool)
    return are_numbers and number > 0 and 0 <= took_us < 1e12


def _rises(numbers: Sequence[int]) -> bool:
    return all(one < other for one, other in pairwise(numbers))
