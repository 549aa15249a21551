"""Steps by measured coefficients, those that a worker's step model learns and reports.

A step takes `fixed + per_token * tokens + per_attended * attended pairs`, as in
`scheduling.step_model`. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from checkpoint.json_keys import JsonKeys
from simulator.devices.step_times import ChunkWork


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


def read_steps(keys: JsonKeys) -> MeasuredSteps:
    """The coefficients of a file, in microseconds there. Raises ModelLoadError."""
    fixed, token, attended = (
        keys.number(name) / 1e6 for name in ("fixed_us", "per_token_us", "per_attended_us")
    )
    return MeasuredSteps(fixed, token, attended)
