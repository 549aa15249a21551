"""How much work each session has had here, so that long ones do not hold up short ones.

Least attained service, as in Autellix (Luo et al., 2025): a session of many or long requests falls
behind step by step, each step for twice as much work as the one before. Requests without a session
fall behind nobody. A session is one share's: where a router infers sessions from prompts, owners
whose prompts begin alike have sessions of the same name. Bounded: sessions that were longest
without a request are forgotten. Pure.
"""

from __future__ import annotations

FIRST_STEP_TOKENS = 8192
"""Tokens of work after which a session falls behind by a step."""
MOST_STEPS = 4
MOST_SESSIONS = 8192
OwnedSession = tuple[str, str]
"""A share, and the name of a session of it; "" for requests without one."""


class SessionService:
    """The tokens that were computed for each session."""

    def __init__(self) -> None:
        self._had: dict[OwnedSession, int] = {}  # in order of the last admission, oldest first

    def __len__(self) -> int:
        return len(self._had)

    def steps_behind(self, session: OwnedSession) -> int:
        """How many steps a session has fallen behind."""
        had = self._had.get(session, 0)
        if had < FIRST_STEP_TOKENS:
            return 0
        return min(MOST_STEPS, (had // FIRST_STEP_TOKENS).bit_length())

    def admit(self, session: OwnedSession) -> None:
        """Note that a request of a session is admitted."""
        if not session[1]:
            return
        self._had[session] = self._had.pop(session, 0)
        if len(self._had) > MOST_SESSIONS:
            del self._had[next(iter(self._had))]

    def charge(self, session: OwnedSession, num_tokens: int) -> None:
        """Add tokens that were computed for a session."""
        if session[1]:
            self._had[session] = self._had.get(session, 0) + num_tokens
