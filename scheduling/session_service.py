"""How much work each session has had here, so that long ones do not hold up short ones.

Least attained service, as in Autellix (Luo et al., 2025): a session of many or long requests falls
behind step by step, each step for twice as much work as the one before. Requests without a session
fall behind nobody. Bounded: sessions that were longest without a request are forgotten. Pure.
"""

from __future__ import annotations

FIRST_STEP_TOKENS = 8192
"""A session that was served this many tokens falls behind by a step."""
MOST_STEPS = 4
MOST_SESSIONS = 8192


class SessionService:
    """The tokens that each session has had."""

    def __init__(self) -> None:
        self._had: dict[str, int] = {}  # by the last admission, the oldest first

    def __len__(self) -> int:
        return len(self._had)

    def steps_behind(self, session: str) -> int:
        """How many steps a session has fallen behind."""
        had = self._had.get(session, 0)
        if had < FIRST_STEP_TOKENS:
            return 0
        return min(MOST_STEPS, (had // FIRST_STEP_TOKENS).bit_length())

    def admit(self, session: str) -> None:
        """A request of a session is admitted."""
        if not session:
            return
        self._had[session] = self._had.pop(session, 0)
        if len(self._had) > MOST_SESSIONS:
            del self._had[next(iter(self._had))]

    def charge(self, session: str, num_tokens: int) -> None:
        """A session has had more tokens."""
        if session:
            self._had[session] = self._had.get(session, 0) + num_tokens
