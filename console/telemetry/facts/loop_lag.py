"""How late this router's event loop runs. Owns the lags of the last seconds."""

from __future__ import annotations

from collections import deque
from statistics import median

from console.doctor.facts import LoopFacts

SECONDS = 10
MIN_LAGS = 10


class LoopLag:
    """The lags of timers, of which one runs every `interval_s`."""

    def __init__(self, interval_s: float = 0.1) -> None:
        self._lags_ms: deque[float] = deque(maxlen=round(SECONDS / interval_s))

    def add(self, lag_s: float) -> None:
        """Note how late a timer ran."""
        self._lags_ms.append(lag_s * 1000)

    def facts(self) -> LoopFacts | None:
        """The median lag and the largest; None while there are too few timers."""
        if len(self._lags_ms) < MIN_LAGS:
            return None
        return LoopFacts(lag_ms=median(self._lags_ms), worst_ms=max(self._lags_ms))
