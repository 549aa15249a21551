"""How often a process may send messages that can wait: so often on average, with short bursts."""

from __future__ import annotations

PERIOD_S, BURST = 0.02, 10
"""The defaults, with which routers tell each other what they have sent."""


class MessageBudget:
    """Allows a message every `period_s` on average, and up to `burst` at once."""

    def __init__(self, period_s: float = PERIOD_S, burst: int = BURST) -> None:
        self._period_s = period_s
        self._slack_s = period_s * (burst - 1)
        self._spent_until = 0.0

    def spend(self, now: float) -> float:
        """Note a message that is sent now; returns the time when the next one may be sent."""
        self._spent_until = max(self._spent_until, now) + self._period_s
        return max(now, self._spent_until - self._slack_s)
