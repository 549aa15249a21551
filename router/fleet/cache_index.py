"""Which KV blocks each worker holds, according to its published events.

Owns one set of block hashes per worker, updated by numbered `CacheEvents` on top of a
`CacheDump`. Knows no sockets: it reports when a dump is needed, and the caller requests one. The
index is a hint for placement; a worker's own cache decides. Invariants: an event is applied only
right after its predecessor, and only if it comes from the same incarnation. The blocks of a
newly routed prompt count as expected, not as held, so that a burst of equal prompts goes to the
same worker as the first one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from protocol.events import CacheEvents
from protocol.messages import CacheDump

MAX_BUFFERED_EVENTS = 4096


class PrefixMatch(msgspec.Struct, frozen=True, gc=False):
    """Leading blocks of a prompt: `held` now, `expected` once routed prompts are computed."""

    held: int
    expected: int


@dataclass
class _WorkerBlocks:
    """One worker's blocks. While a dump is awaited, `seq` is None and events wait in `buffer`.

    `pending` maps an expected block to its expiry; `routed` has the same by prompt, oldest first.
    """

    incarnation: str
    hashes: set[bytes] = field(default_factory=set)
    seq: int | None = None
    buffer: list[CacheEvents] = field(default_factory=list)
    pending: dict[bytes, float] = field(default_factory=dict)
    routed: deque[tuple[float, list[bytes]]] = field(default_factory=deque)

    def apply(self, events: CacheEvents) -> None:
        self.hashes.difference_update(events.removed)
        self.hashes.update(events.stored)
        for digest in (*events.removed, *events.stored):
            self.pending.pop(digest, None)
        self.seq = events.seq


class CacheIndex:
    """The blocks of every worker of the fleet. `now` is any monotonic clock, in seconds."""

    def __init__(self, pending_ttl_s: float) -> None:
        self._pending_ttl_s = pending_ttl_s
        self._workers: dict[str, _WorkerBlocks] = {}
        self.gaps = 0

    def join(self, worker_id: str, incarnation: str) -> None:
        """Start to follow a worker with an empty set; the caller requests a dump from it."""
        self._workers[worker_id] = _WorkerBlocks(incarnation)

    def leave(self, worker_id: str) -> None:
        """Forget a worker."""
        self._workers.pop(worker_id, None)

    def apply_events(self, events: CacheEvents) -> bool:
        """Take one event; True if the caller must request a dump because events are missing."""
        worker = self._workers.get(events.worker_id)
        if worker is None or worker.incarnation != events.incarnation:
            return False
        if worker.seq is None:
            return self._hold(worker, events)
        if events.seq <= worker.seq:
            return False
        if events.seq == worker.seq + 1:
            worker.apply(events)
            return False
        return self._lose_track(worker, events)

    def apply_dump(self, worker_id: str, dump: CacheDump) -> bool:
        """Apply a dump and the events that follow it; True if another dump is needed."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.incarnation != dump.incarnation:
            return False
        if worker.seq is not None and dump.seq < worker.seq:
            return False
        waiting, worker.buffer = worker.buffer, []
        worker.hashes = set(dump.hashes)
        worker.seq = dump.seq
        for digest in dump.hashes:
            worker.pending.pop(digest, None)
        wants_dump = False
        for events in sorted(waiting, key=lambda each: each.seq):
            wants_dump = self.apply_events(events) or wants_dump
        return wants_dump

    def expect(self, worker_id: str, hashes: Sequence[bytes], now: float) -> None:
        """Expect these blocks of a routed prompt on a worker; the expectation expires."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        pending, routed = worker.pending, worker.routed
        while routed and routed[0][0] <= now:
            for digest in routed.popleft()[1]:
                if pending.get(digest, now) <= now:
                    pending.pop(digest, None)
        expiry = now + self._pending_ttl_s
        new = [digest for digest in hashes if digest not in worker.hashes]
        pending.update(dict.fromkeys(new, expiry))
        if new:
            routed.append((expiry, new))

    def match(self, worker_id: str, hashes: Sequence[bytes], now: float) -> PrefixMatch:
        """How many leading blocks of a prompt a worker holds now and will soon hold."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return PrefixMatch(0, 0)
        held = 0
        while held < len(hashes) and hashes[held] in worker.hashes:
            held += 1
        expected = held
        while expected < len(hashes) and (
            hashes[expected] in worker.hashes or worker.pending.get(hashes[expected], now) > now
        ):
            expected += 1
        return PrefixMatch(held, expected)

    def num_blocks(self, worker_id: str) -> int:
        """How many blocks a worker is known to hold."""
        worker = self._workers.get(worker_id)
        return 0 if worker is None else len(worker.hashes)

    def is_synced(self, worker_id: str) -> bool:
        """Whether the worker's dump arrived and no event has been missed since."""
        worker = self._workers.get(worker_id)
        return worker is not None and worker.seq is not None

    @staticmethod
    def _hold(worker: _WorkerBlocks, events: CacheEvents) -> bool:
        """Buffer an event until the dump arrives; True if the buffer overflowed and a new dump
        is needed."""
        if len(worker.buffer) < MAX_BUFFERED_EVENTS:
            worker.buffer.append(events)
            return False
        worker.buffer = [events]
        return True

    def _lose_track(self, worker: _WorkerBlocks, events: CacheEvents) -> bool:
        """An event is missing: drop the blocks, which may be wrong, until the next dump."""
        self.gaps += 1
        worker.hashes.clear()
        worker.seq = None
        worker.buffer = [events]
        return True
