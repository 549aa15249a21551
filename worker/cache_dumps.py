"""Gives routers the list of cached blocks in pieces, so that the list does not delay tokens.

A list and tokens share a router's connection, which keeps their order, and the list of a large
cache takes megabytes. A router asks for each piece when it has the one before. So at most one piece
is on its way to a router, however slow the network, and tokens wait for one piece at most.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from process.sockets.control import Peer
from protocol.messages import CacheDump, CacheDumpRequest

PIECE_BLOCKS = 1500
"""A piece is a single frame: 18 bytes for a block."""


class CacheDumps:
    """Keeps the list that each router is reading, as of the router's first request. The next
    request of any router drops the lists of routers that are gone."""

    def __init__(self, take: Callable[[], CacheDump]) -> None:
        """`take` returns the whole list as it is now."""
        self._take = take
        self._lists: dict[Peer, CacheDump] = {}

    def __len__(self) -> int:
        return len(self._lists)

    def piece(self, peer: Peer, asked: CacheDumpRequest, connected: Collection[Peer]) -> CacheDump:
        """The piece that a router asks for. If its list is not here, or if the router asks for a
        new one, that is the first piece of a new list."""
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
