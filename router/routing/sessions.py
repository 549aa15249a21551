"""Which workers served each session last; its next request goes there if that costs no more.

Pure. A session is a name that a client gives to requests that continue each other. Bounded: the
sessions that were longest without a request are forgotten.
"""

from __future__ import annotations

from collections import OrderedDict

MOST_SESSIONS = 1 << 14


class Sessions:
    """The workers of the sessions that were active lately."""

    def __init__(self, most: int = MOST_SESSIONS) -> None:
        self._most = most
        self._workers: OrderedDict[str, tuple[str, str | None]] = OrderedDict()

    def workers(self, session: str) -> frozenset[str]:
        """The last decode worker of a session, and its last prefill worker; none for a new session,
        or without one."""
        found = self._workers.get(session) if session else None
        return frozenset() if found is None else frozenset(filter(None, found))

    def note(self, session: str, decode: str, prefill: str | None) -> None:
        """A request of the session runs on these workers."""
        if not session:
            return
        _, former = self._workers.get(session, (decode, None))
        self._workers[session] = decode, prefill or former
        self._workers.move_to_end(session)
        if len(self._workers) > self._most:
            self._workers.popitem(last=False)
