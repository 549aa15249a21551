"""Which blocks have come into a tier and which have left it; routers place requests by them.

Pure. At most `MAX_REPORTED` blocks of a tier are reported; later ones are left out until some of
these have gone. Changes are taken in portions. A block has one pending change at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from protocol.hashing import HASH_BYTES, end_of

MAX_REPORTED = 1 << 16
"""The most blocks of one tier. With 16 tokens in a block, they hold a million tokens."""


class TierDelta(NamedTuple):
    """Hashes that came into a tier, and hashes that left it."""

    stored: list[bytes]
    removed: list[bytes]


class TierNews:
    """The changes of one tier since they were last taken."""

    def __init__(self, most: int = MAX_REPORTED) -> None:
        self._most = most
        self._known: set[bytes] = set()
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def store(self, digest: bytes) -> None:
        """Note that a block has come."""
        if digest in self._known or len(self._known) >= self._most:
            return
        self._known.add(digest)
        if digest in self._removed:
            del self._removed[digest]
        else:
            self._stored[digest] = None

    def remove(self, digest: bytes) -> None:
        """Note that a block has left."""
        if digest not in self._known:
            return
        self._known.remove(digest)
        if digest in self._stored:
            del self._stored[digest]
        else:
            self._removed[digest] = None

    def take(self, count: int) -> TierDelta:
        """At most `count` changes of each kind, which are no longer pending."""
        delta = TierDelta(list(islice(self._stored, count)), list(islice(self._removed, count)))
        for digest in delta.stored:
            del self._stored[digest]
        for digest in delta.removed:
            del self._removed[digest]
        return delta

    def hashes(self) -> list[bytes]:
        """The blocks that are or will be reported as stored."""
        return list(self._known)


class GroupNews(TierNews):
    """The changes of a tier that has units of several groups of layers, the first of which keeps
    all tokens: the first group's blocks, and ends (`protocol.hashing.end_of`). `per_block` are the
    units of a block, by group.

    A block counts as an end if all other groups have all units of their blocks for it. The other
    groups keep only the blocks that a prefix needs to end somewhere. The last of these blocks is
    such an end; the earlier ones need not be.
    """

    def __init__(self, per_block: Sequence[int], most: int = MAX_REPORTED) -> None:
        super().__init__(most)
        self._whole = (per_block[0], sum(per_block[1:]))
        self._num_there: tuple[Counter[bytes], Counter[bytes]] = (Counter(), Counter())

    def store(self, digest: bytes) -> None:
        """Note that the unit with this name has come."""
        block, is_of_end = _parse(digest)
        there = self._num_there[is_of_end]
        there[block] += 1
        if there[block] == self._whole[is_of_end]:
            super().store(end_of(block) if is_of_end else block)

    def remove(self, digest: bytes) -> None:
        """Note that a unit has left."""
        block, is_of_end = _parse(digest)
        there = self._num_there[is_of_end]
        if there[block] == self._whole[is_of_end]:
            super().remove(end_of(block) if is_of_end else block)
        there[block] -= 1
        if not there[block]:
            del there[block]


def _parse(name: bytes) -> tuple[bytes, bool]:
    """The hash of a unit's block, and whether the block is of a group other than the first."""
    return name[:HASH_BYTES], any(name[HASH_BYTES : HASH_BYTES + 1])
