"""Which workers served each session last; its next request goes there if that costs no more.

Pure. A session is a name that a client gives to requests that continue each other. If the client
gives no name, a prompt belongs to the session whose last prompt it continues: the longest last
prompt whose blocks it begins with. A beginning that several sessions share identifies none.
Bounded: sessions without a request for the longest time are forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

MOST_SESSIONS = 1 << 14
LOOK_BACK = 1024
"""The end of the session's last prompt is looked for among this many blocks, from the prompt's
end."""
_NO_WORKERS: frozenset[str] = frozenset()
_SEVERAL = b""
"""No block."""


class _Chain(msgspec.Struct, gc=False):
    """The end of a session's prompt, and the block with which a later prompt continued it."""

    session: str
    following: bytes | None = None


class Sessions:
    """The workers of the sessions that were active lately, and the ends of their prompts."""

    def __init__(self, most: int = MOST_SESSIONS) -> None:
        self._most = most
        self._workers: OrderedDict[str, tuple[str, str | None]] = OrderedDict()
        self._chains: OrderedDict[bytes, _Chain] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def workers(self, session: str) -> frozenset[str]:
        """The last decode worker of a session, and its last prefill worker; none for a new session,
        or without one."""
        found = self._workers.get(session) if session else None
        return _NO_WORKERS if found is None else frozenset(filter(None, found))

    def inferred(self, hashes: Sequence[bytes]) -> str:
        """The session of a prompt whose client names none, by the hashes of its blocks. "" if it
        cannot be inferred: the prompt has no full block, or none beyond those of an earlier
        prompt."""
        if not hashes:
            return ""
        at = self._continued(hashes)
        if at is None:
            return _name(hashes)
        if at + 1 == len(hashes):
            return ""
        chain = self._chains[hashes[at]]
        is_own = chain.following in (None, hashes[at + 1])
        return chain.session if is_own else _name(hashes)

    def note(self, session: str, decode: str, prefill: str | None) -> None:
        """Note that a request of the session runs on these workers."""
        if not session:
            return
        _, former = self._workers.get(session, (decode, None))
        self._workers[session] = decode, prefill or former
        self._workers.move_to_end(session)
        if len(self._workers) > self._most:
            self._workers.popitem(last=False)

    def note_prompt(self, session: str, hashes: Sequence[bytes]) -> None:
        """Note that the prompt belongs to this session. A block that two sessions continue in
        different ways no longer identifies either."""
        if not session:
            return
        at = self._continued(hashes)
        if at is not None:
            chain = self._chains[hashes[at]]
            if chain.following is None:
                chain.following = hashes[at + 1]
            elif chain.following != hashes[at + 1]:
                chain.following = _SEVERAL
        self._chains[hashes[-1]] = _Chain(session)
        if len(self._chains) > 2 * self._most:
            self._chains.popitem(last=False)

    def _continued(self, hashes: Sequence[bytes]) -> int | None:
        """The place of the last block that ends an earlier prompt."""
        chains = self._chains
        if chains.keys().isdisjoint(hashes[-LOOK_BACK:]):  # the usual, quick case
            return None
        for at in range(len(hashes) - 1, max(0, len(hashes) - LOOK_BACK) - 1, -1):
            if hashes[at] in chains:
                return at
        return None


def _name(hashes: Sequence[bytes]) -> str:
    return f"prompt {hashes[-1].hex()}"
