"""A worker that tells an index all changes of its cache."""

from __future__ import annotations

import msgspec

from protocol.events import CacheEvents
from protocol.messages import CacheDump, CacheDumpRequest
from router.routing.caches.cache_index import CacheIndex


def digest(number: int) -> bytes:
    return number.to_bytes(16, "little")


CHAIN = [digest(each) for each in range(8)]


class TruthfulWorker:
    """What a worker does: numbers its events and answers dump requests."""

    def __init__(self, incarnation: str = "i1") -> None:
        self.incarnation = incarnation
        self.seq = 0
        self.hashes: set[bytes] = set()

    def change(self, stored: list[int], removed: list[int]) -> CacheEvents:
        self.seq += 1
        self.hashes -= {digest(each) for each in removed}
        self.hashes |= {digest(each) for each in stored}
        return CacheEvents(
            worker_id="w",
            incarnation=self.incarnation,
            seq=self.seq,
            stored=[digest(each) for each in stored],
            removed=[digest(each) for each in removed],
        )

    def dump(self) -> CacheDump:
        return CacheDump(incarnation=self.incarnation, seq=self.seq, hashes=list(self.hashes))


def synced(worker: TruthfulWorker) -> CacheIndex:
    index = CacheIndex(pending_ttl_s=5.0)
    index.join("w", worker.incarnation)
    assert not index.apply_dump("w", worker.dump())
    return index


def held(index: CacheIndex, *numbers: int, now: float = 0.0) -> int:
    return index.match("w", [digest(each) for each in numbers], now).held


def piece_for(asked: CacheDumpRequest, worker: TruthfulWorker, size: int = 2) -> CacheDump:
    """What the worker answers, if its cache has not changed since the dump began."""
    whole, end = worker.dump(), asked.first + size
    return msgspec.structs.replace(
        whole,
        hashes=sorted(whole.hashes)[asked.first : end],
        nonce=asked.nonce,
        first=asked.first,
        is_last=end >= len(whole.hashes),
    )


def indexed(index: CacheIndex) -> set[bytes]:
    return {digest(each) for each in range(8) if index._held.of(digest(each))}
