"""A worker's step time and token rate, from the growth of its counters over a few seconds."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from protocol.events import WorkerStats

WINDOW_US = 5_000_000
_SAMPLE_US = 500_000


class _Sample(NamedTuple):
    at_us: int
    steps: int
    step_us: int
    tokens: int


class Rates:
    """Rates over about `WINDOW_US`; the times are those of the worker's reports."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()
        self._last: _Sample | None = None

    def observe(self, stats: WorkerStats) -> None:
        """Take a load report."""
        counters = stats.counters
        self._last = last = _Sample(
            stats.reported_us,
            counters.get("steps", 0),
            counters.get("step_us", 0),
            counters.get("prefill_tokens", 0) + counters.get("decode_tokens", 0),
        )
        samples = self._samples
        if not samples or last.at_us - samples[-1].at_us >= _SAMPLE_US:
            samples.append(last)
        while len(samples) > 2 and samples[1].at_us <= last.at_us - WINDOW_US:
            samples.popleft()

    @property
    def step_ms(self) -> float | None:
        """Mean time of a step; None if there were no steps."""
        grown = self._growth()
        if grown is None or grown.steps <= 0:
            return None
        return grown.step_us / grown.steps / 1000

    @property
    def tokens_per_s(self) -> float | None:
        """Prompt tokens computed and tokens decoded per second; None before a second report."""
        grown = self._growth()
        return None if grown is None else grown.tokens / grown.at_us * 1e6

    def _growth(self) -> _Sample | None:
        if self._last is None or not self._samples:
            return None
        first = self._samples[0]
        if self._last.at_us <= first.at_us:
            return None
        return _Sample(*(b - a for a, b in zip(first, self._last, strict=True)))
