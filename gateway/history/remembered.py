"""The ids of answers in this router's memory: bounded in bytes and in time, fair to every owner.

Pure. An entry lies under a keyed digest of the whole text up to the answer's end, so a text that
differs anywhere before does not find it. If there is no room, the oldest entries of the owner with
the most bytes make room. An entry without ids notes that there is no answer to look for.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

ENTRY_BYTES = 256
"""Bytes counted for an entry in addition to its ids."""
MOST_LENGTHS = 64


@dataclass(frozen=True, slots=True)
class _Entry:
    ids: bytes
    ends_at: float

    @property
    def num_bytes(self) -> int:
        return len(self.ids) + ENTRY_BYTES


class Remembered:
    """Entries by owner and name; `num_bytes` is what all of them take."""

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float]) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._owners: dict[str, OrderedDict[bytes, _Entry]] = {}
        self._bytes: dict[str, int] = {}
        self._lengths: dict[str, deque[int]] = {}
        self.num_bytes = 0

    def has(self, owner: str) -> bool:
        """Whether this owner has any entry."""
        return owner in self._owners

    def lengths(self, owner: str) -> list[int]:
        """The latest lengths of texts that end with an answer without a mark."""
        return list(self._lengths.get(owner, ()))

    def put(self, owner: str, name: bytes, ids: bytes, length: int | None = None) -> None:
        """Remember an answer, in place of an earlier entry; empty ids mean that there is no answer.
        `length` is that of the text up to the answer's end, if no mark shows this place."""
        entry = _Entry(ids, self._clock() + self._ttl_s)
        if entry.num_bytes > self._max_bytes:
            return
        self._drop(owner, name)
        self._owners.setdefault(owner, OrderedDict())[name] = entry
        self._count(owner, entry.num_bytes)
        if length is not None:
            self._lengths.setdefault(owner, deque(maxlen=MOST_LENGTHS)).append(length)
        self._expire(owner)
        while self.num_bytes > self._max_bytes:
            largest = max(self._bytes, key=self._bytes.__getitem__)
            self._drop(largest, next(iter(self._owners[largest])))

    def find(self, owner: str, name: bytes) -> bytes | None:
        """An answer's ids; empty if it is known that there are none, None if nothing is known."""
        entries = self._owners.get(owner)
        entry = None if entries is None else entries.get(name)
        if entry is None:
            return None
        if entry.ends_at <= self._clock():
            self._drop(owner, name)
            return None
        return entry.ids

    def sweep(self) -> None:
        """Drop all expired entries."""
        for owner in list(self._owners):
            self._expire(owner)

    def _expire(self, owner: str) -> None:
        now = self._clock()
        while owner in self._owners:
            name, entry = next(iter(self._owners[owner].items()))
            if entry.ends_at > now:
                return
            self._drop(owner, name)

    def _drop(self, owner: str, name: bytes) -> None:
        entries = self._owners.get(owner)
        entry = None if entries is None else entries.pop(name, None)
        if entries is None or entry is None:
            return
        self._count(owner, -entry.num_bytes)
        if not entries:
            del self._owners[owner], self._bytes[owner]
            self._lengths.pop(owner, None)

    def _count(self, owner: str, num_bytes: int) -> None:
        self._bytes[owner] = self._bytes.get(owner, 0) + num_bytes
        self.num_bytes += num_bytes
