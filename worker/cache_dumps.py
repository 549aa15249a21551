"""Gives routers the list of cached blocks in pieces, so that it does not delay tokens.

A list and tokens share a router's connection, which keeps its order, and a large cache is a list of
megabytes. A router asks for the next piece when it has the one before. So at most one piece is on
its way to a router, however slow the network is, and a token waits for no more than that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from process.sockets.control import Peer
from protocol.messages import CacheDump, CacheDumpRequest

PIECE_BLOCKS = 1500
"""A piece is a single frame: 18 bytes for a block."""


class CacheDumps:
    """Keeps the list that each router is reading, as it was when the router asked for it. Lists of
    routers that are gone end with the next request of any router."""

    def __init__(self, take: Callable[[], CacheDump]) -> None:
        """`take` returns the whole list of now."""
        self._take = take
        self._lists: dict[Peer, CacheDump] = {}

    def __len__(self) -> int:
        return len(self._lists)

    def piece(self, peer: Peer, asked: CacheDumpRequest, connected: Collection[Peer]) -> CacheDump:
        """The piece that a router asks for; the first one of a new list if it asks for that, or if
        its list is not here."""
        whole, first = self._lists.pop(peer, None), asked.first
        self._lists = {one: kept for one, kept in self._lists.items() if one in connected}
        if whole is None or not 0 < first < len(whole.hashes):
            whole, first = self._take(), 0
        end = first + PIECE_BLOCKS
        is_last = end >= len(whole.hashes)
        if not is_last:
            self._lists[peer] = whole
        return msgspec.structs.replace(
            whole, hashes=whole.hashes[first:end], nonce=asked.nonce, first=first, is_last=is_last
        )
