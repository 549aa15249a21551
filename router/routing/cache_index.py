"""Which KV blocks each worker holds, according to its published events.

Owns one set of block hashes per worker, updated by numbered `CacheEvents` on top of a `CacheDump`,
which comes in pieces, and one index from hash to workers. Knows no sockets: it reports when a dump
is needed, and the caller sends its requests. The index is a hint for placement; a worker's own
cache decides. Invariants: after a missing event, which the next event or load report reveals, a
worker's blocks stay a hint until a dump has come. An event counts only if it comes from the same
incarnation. The blocks of a newly routed prompt count as expected, not as held, so that a burst of
equal prompts goes to the same worker as the first one. A worker whose layers keep windows also
reports where cached prefixes can end: of the blocks that it holds, those up to the last end count.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NoReturn

import msgspec

from process.figures import count
from protocol.errors import ProtocolError
from protocol.events import CacheEvents
from protocol.hashing import end_of
from protocol.messages import CacheDump, CacheDumpRequest
from router.routing.block_holders import BlockHolders, by_worker
from router.routing.tier_blocks import TierBlocks

MAX_BUFFERED_EVENTS = 4096
MOST_IN_TIERS = 1 << 18
"""Blocks in a worker's tiers that the index holds."""
MAX_BLOCKS = 1 << 23
"""Blocks of a worker that the index holds, whatever the worker has registered."""
RETRY_S, MAX_RETRY_S = 2.0, 60.0
"""A piece of a dump that does not come is requested again after this time, which doubles each time
until the dump is whole."""
MAX_PENDING = 32_768
"""Blocks that are expected on one worker; of more, the oldest prompts are forgotten."""
SLICE = 50_000
"""Blocks that are indexed at once; a larger cache comes into the index bit by bit."""


class PrefixMatch(msgspec.Struct, frozen=True, gc=False):
    """Leading blocks of a prompt: `held` in a worker's pool now, `expected` once routed prompts are
    computed. Behind those that are held, the worker has `in_host` blocks in its host memory and
    `on_disk` on its disk."""

    held: int
    expected: int
    in_host: int = 0
    on_disk: int = 0

    @property
    def num_own(self) -> int:
        """Leading blocks that the worker need not compute, in its pool or a tier."""
        return self.held + self.in_host + self.on_disk


NO_MATCH = PrefixMatch(0, 0)
KEPT_ENDS = 2
"""Ends that a worker with windows keeps of each prompt that it computes: the last ones."""


@dataclass(eq=False)
class _WorkerBlocks:
    """One worker's blocks; `bit` stands for the worker in the index, `most` is the number of blocks
    beyond which its reports cannot be true.

    While a dump is awaited, `seq` is None and events wait in `buffer`, with `buffered` hashes of
    the pool and `buffered_in_tiers` others; the dump is requested again at `retry_at`. `gathered`
    are the hashes of the dump that have come. `asked` is the number of the dump's last request:
    answers to earlier requests are dropped.

    `pending` maps an expected block to its expiry; `routed` has the same by prompt, oldest first.
    """

    incarnation: str
    bit: int
    most: int
    hashes: set[bytes] = field(default_factory=set)
    seq: int | None = None
    buffer: list[CacheEvents] = field(default_factory=list)
    buffered: int = 0
    buffered_in_tiers: int = 0
    gathered: list[bytes] = field(default_factory=list)
    asked: int = 0
    pending: dict[bytes, float] = field(default_factory=dict)
    routed: deque[tuple[float, Sequence[bytes]]] = field(default_factory=deque)
    retry_at: float | None = None
    retry_s: float = RETRY_S
    is_gone: bool = False


class CacheIndex:
    """The blocks of every worker of the fleet. `now` is any monotonic clock, in seconds."""

    def __init__(self, pending_ttl_s: float) -> None:
        self._pending_ttl_s = pending_ttl_s
        self._workers: dict[str, _WorkerBlocks] = {}
        self._held = BlockHolders()
        self._tiers = TierBlocks()
        self._expected = BlockHolders()
        self._unsorted: deque[tuple[_WorkerBlocks, Iterator[bytes]]] = deque()
        self._free_bits: list[int] = []
        self._num_bits = 0
        self._everybody = 0  # the bits of all workers
        self._windowed = 0  # the bits of workers whose layers keep windows
        self._names: dict[int, str] = {}  # by bit
        self._next_expiry = math.inf  # of expected blocks, or earlier
        self.gaps = 0
        self.changes = 0
        """Grows with every change of what workers hold, or are expected to hold."""

    def join(
        self,
        worker_id: str,
        incarnation: str,
        num_blocks: int = MAX_BLOCKS,
        has_windows: bool = False,
    ) -> None:
        """Follow a worker with so many blocks, whose set is empty at first; the caller requests a
        dump from it."""
        self.leave(worker_id)
        self.changes += 1
        if not self._free_bits:
            self._free_bits.append(1 << self._num_bits)
            self._num_bits += 1
        bit = self._free_bits.pop()
        self._workers[worker_id] = _WorkerBlocks(incarnation, bit, 2 * min(num_blocks, MAX_BLOCKS))
        self._everybody |= bit
        self._windowed |= bit if has_windows else 0
        self._names[bit] = worker_id

    def leave(self, worker_id: str) -> None:
        """Forget a worker."""
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            self.changes += 1
            worker.is_gone = True
            self._everybody &= ~worker.bit
            self._windowed &= ~worker.bit
            self._forget_pending(worker, list(worker.pending))
            self._tiers.forget(worker.bit)
            self._sort(worker, worker.hashes)

    def apply_events(self, events: CacheEvents) -> bool:
        """Take one event; True if the caller must request a dump because events are missing.
        Raises ProtocolError if the worker reports more blocks than it can have."""
        worker = self._workers.get(events.worker_id)
        if worker is None or worker.incarnation != events.incarnation:
            return False
        if worker.seq is None:
            self._apply(worker, events)
            return self._hold(worker, events)
        if events.seq <= worker.seq:
            return False
        self._apply(worker, events)
        if events.seq == worker.seq + 1:
            worker.seq = events.seq
            return False
        return self._lose_track(worker, events)

    def take_piece(self, worker_id: str, piece: CacheDump) -> CacheDumpRequest | None:
        """Take a piece of a dump, and apply the dump once it is complete. Returns the next request
        for the caller to send. A piece that answers no request, or an earlier one, changes
        nothing. Raises ProtocolError if the worker lists more blocks than it can have."""
        worker = self._workers.get(worker_id)
        if worker is None or (worker.incarnation, worker.asked) != (piece.incarnation, piece.nonce):
            return None
        if piece.first not in (0, len(worker.gathered)):
            return None
        del worker.gathered[piece.first :]
        num_own = len(worker.gathered) + len(piece.hashes) - piece.num_host - piece.num_disk
        if num_own > worker.most or piece.num_host + piece.num_disk > MOST_IN_TIERS:
            self._disbelieve(worker)
        worker.gathered += piece.hashes
        worker.retry_at = None
        if not piece.is_last:
            return self.next_piece(worker_id)
        worker.asked += 1
        hashes, worker.gathered = worker.gathered, []
        whole = msgspec.structs.replace(piece, hashes=hashes)
        return self.new_dump(worker_id) if self.apply_dump(worker_id, whole) else None

    def new_dump(self, worker_id: str) -> CacheDumpRequest:
        """The request for the first piece of a new dump. A dump in progress is given up."""
        self._workers[worker_id].gathered = []
        return self.next_piece(worker_id)

    def next_piece(self, worker_id: str) -> CacheDumpRequest:
        """The request for the next piece of the dump. An answer to an earlier request no longer
        counts."""
        worker = self._workers[worker_id]
        worker.asked += 1
        return CacheDumpRequest(nonce=worker.asked, first=len(worker.gathered))

    def apply_dump(self, worker_id: str, dump: CacheDump) -> bool:
        """Apply a whole dump and the events that follow it; True if another one is needed."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.incarnation != dump.incarnation:
            return False
        if worker.seq is not None and dump.seq < worker.seq:
            return False
        waiting, worker.buffer = worker.buffer, []
        disk = len(dump.hashes) - dump.num_disk
        host = disk - dump.num_host
        former, worker.hashes = worker.hashes, set(dump.hashes[:host])
        self._tiers.replace(worker.bit, dump.hashes[host:disk], dump.hashes[disk:])
        worker.seq, worker.retry_at, worker.retry_s = dump.seq, None, RETRY_S
        self._forget_pending(worker, [each for each in worker.pending if each in worker.hashes])
        self._sort(worker, former ^ worker.hashes)
        wants_dump = False
        for events in sorted(waiting, key=lambda each: each.seq):
            wants_dump = self.apply_events(events) or wants_dump
        return wants_dump

    def check_seq(self, worker_id: str, incarnation: str, seq: int) -> bool:
        """Compare with the number of a worker's newest event. True if that event has not come and
        the caller must request a dump."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.incarnation != incarnation:
            return False
        return worker.seq is not None and seq > worker.seq and self._lose_track(worker)

    def overdue(self, now: float) -> list[str]:
        """The workers whose dump has not come in time and must be requested again. Call it
        periodically."""
        found = []
        for worker_id, worker in self._workers.items():
            if worker.seq is not None:
                continue
            if worker.retry_at is None:
                worker.retry_at = now + worker.retry_s
            elif now >= worker.retry_at:
                worker.retry_s = min(2 * worker.retry_s, MAX_RETRY_S)
                worker.retry_at = now + worker.retry_s
                found.append(worker_id)
        return found

    def tidy(self, now: float) -> None:
        """Index the next part of caches that were too large to index at once, and drop expired
        expectations. Call it periodically."""
        self._expire_all(now)
        self._sort_some()

    def expect(self, worker_id: str, hashes: Sequence[bytes], now: float) -> None:
        """Expect these blocks of a routed prompt on a worker; the expectation expires."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        self._expire(worker, now)
        self.changes += 1
        expiry = now + self._pending_ttl_s
        if worker.bit & self._windowed:
            hashes = [*hashes, *map(end_of, hashes[-KEPT_ENDS:])]
        new = hashes
        if not worker.hashes.isdisjoint(hashes):
            new = [digest for digest in hashes if digest not in worker.hashes]
        if new:
            worker.pending.update(dict.fromkeys(new, expiry))
            worker.routed.append((expiry, new))
            self._next_expiry = min(self._next_expiry, expiry)
            self._expected.add(worker.bit, new)
        while len(worker.pending) > MAX_PENDING and len(worker.routed) > 1:
            self._forget_pending(worker, worker.routed.popleft()[1])

    def matches(self, hashes: Sequence[bytes], now: float) -> dict[str, PrefixMatch]:
        """The number of leading blocks of a prompt that each worker holds now and will soon hold,
        for workers that hold any. Beyond the first `EXACT_BLOCKS` blocks, holes may be
        overlooked."""
        if not hashes:
            return {}
        if now >= self._next_expiry:
            self._expire_all(now)
        found = self._pool_matches(hashes)
        if self._tiers.has_any:
            held = {bit: each.held for bit, each in found.items()}
            for bit, own in self._tiers.beyond(hashes, self._held, held).items():
                match = found.get(bit, NO_MATCH)
                found[bit] = PrefixMatch(match.held, match.expected, own.in_host, own.on_disk)
        return {self._names[bit]: each for bit, each in found.items()}

    def _pool_matches(self, hashes: Sequence[bytes]) -> dict[int, PrefixMatch]:
        """The matches in pools, by the bit of the worker."""
        first, everybody = hashes[0], self._everybody
        if not self._held.of(first) & everybody:
            expecting = self._expected.of(first)
            if not expecting:
                return {}  # a new prompt, as many are
            soon = by_worker(self._held.runs(hashes, expecting, also=self._expected))
            return self._usable(hashes, {bit: PrefixMatch(0, count) for bit, count in soon.items()})
        runs = self._held.runs(hashes, everybody)
        expecting = sum(each.bit for each in self._workers.values() if each.pending)
        if runs[-1].num_blocks == len(hashes):
            expecting &= ~runs[-1].workers
        found = {bit: PrefixMatch(count, count) for bit, count in by_worker(runs).items()}
        if expecting:
            start = next(each.num_blocks for each in runs if each.workers & expecting)
            soon = by_worker(self._held.runs(hashes, expecting, start, also=self._expected))
            for bit, count in soon.items():
                found[bit] = PrefixMatch(found.get(bit, NO_MATCH).held, count)
        return self._usable(hashes, found)

    def _usable(
        self, hashes: Sequence[bytes], found: dict[int, PrefixMatch]
    ) -> dict[int, PrefixMatch]:
        """The usable blocks: all, or those up to the last end."""
        for bit in [each for each in found if each & self._windowed]:
            held = self._held.last_end(hashes[: found[bit].held], bit)
            soon = self._held.last_end(hashes[: found[bit].expected], bit, also=self._expected)
            found[bit] = PrefixMatch(held, soon)
            if not soon:
                del found[bit]
        return found

    def match(self, worker_id: str, hashes: Sequence[bytes], now: float) -> PrefixMatch:
        """As `matches`, for one worker."""
        return self.matches(hashes, now).get(worker_id, NO_MATCH)

    def holders(self, digest: bytes) -> list[str]:
        """The workers that hold a block."""
        return [name for name, worker in self._workers.items() if digest in worker.hashes]

    def num_blocks(self, worker_id: str) -> int:
        """Number of blocks that a worker is known to hold."""
        worker = self._workers.get(worker_id)
        return 0 if worker is None else len(worker.hashes)

    def is_synced(self, worker_id: str) -> bool:
        """Whether the worker's dump has arrived and no event has been missed since."""
        worker = self._workers.get(worker_id)
        return worker is not None and worker.seq is not None

    def _apply(self, worker: _WorkerBlocks, events: CacheEvents) -> None:
        if len(worker.hashes) + len(events.stored) > worker.most:
            self._disbelieve(worker)
        self.changes += 1
        if events.tiers:
            self._tiers.apply(worker.bit, events.tiers)
            if self._tiers.num_blocks(worker.bit) > MOST_IN_TIERS:
                self._disbelieve(worker)
        worker.hashes.difference_update(events.removed)
        worker.hashes.update(events.stored)
        self._held.remove(worker.bit, events.removed)
        self._held.add(worker.bit, events.stored)
        if worker.pending:
            self._forget_pending(worker, chain(events.removed, events.stored))

    def _disbelieve(self, worker: _WorkerBlocks) -> NoReturn:
        """Forget what a worker has reported, which cannot be true. A missed event explains some
        blocks too many, but not as many as the pool has."""
        former, worker.hashes = worker.hashes, set()
        self._tiers.forget(worker.bit)
        worker.seq, worker.buffer, worker.gathered = None, [], []
        self._sort(worker, former)
        raise ProtocolError(
            f"it reports more than {count(worker.most, 'block')}, or {MOST_IN_TIERS} in tiers"
        )

    @staticmethod
    def _hold(worker: _WorkerBlocks, events: CacheEvents) -> bool:
        """Buffer an event until the dump arrives; True if the buffer overflowed and a new dump
        is needed."""
        num_own = num_new = len(events.stored) + len(events.removed)
        in_tiers = new_in_tiers = sum([len(e.stored) + len(e.removed) for e in events.tiers])
        if worker.buffer:
            num_own, in_tiers = num_own + worker.buffered, in_tiers + worker.buffered_in_tiers
        fits = num_own <= worker.most and in_tiers <= MOST_IN_TIERS
        if fits and len(worker.buffer) < MAX_BUFFERED_EVENTS:
            worker.buffer.append(events)
            worker.buffered, worker.buffered_in_tiers = num_own, in_tiers
            return False
        worker.buffer = [events]
        worker.buffered, worker.buffered_in_tiers = num_new, new_in_tiers
        return True

    def _lose_track(self, worker: _WorkerBlocks, events: CacheEvents | None = None) -> bool:
        """Keep the blocks as a hint until the next dump, because an event is missing and some of
        the blocks may be wrong."""
        self.gaps += 1
        worker.seq = None
        worker.buffer = []
        if events is not None:
            self._hold(worker, events)
        return True

    def _sort(self, worker: _WorkerBlocks, digests: Iterable[bytes]) -> None:
        """Update the index for these blocks from the worker's set."""
        self._unsorted.append((worker, iter(list(digests))))
        if len(self._unsorted) == 1:
            self._sort_some()

    def _sort_some(self) -> None:
        self.changes += bool(self._unsorted)
        budget = SLICE
        while self._unsorted and budget > 0:
            worker, digests = self._unsorted[0]
            part = list(islice(digests, budget))
            budget -= len(part)
            held = () if worker.is_gone else worker.hashes.intersection(part)
            self._held.remove(worker.bit, part)
            self._held.add(worker.bit, held)
            if budget > 0:
                self._unsorted.popleft()
                if worker.is_gone and not any(each is worker for each, _ in self._unsorted):
                    self._free_bits.append(worker.bit)

    def _expire_all(self, now: float) -> None:
        """Forget all expired expectations."""
        self._next_expiry = math.inf
        for worker in self._workers.values():
            self._expire(worker, now)
            if worker.routed:
                self._next_expiry = min(self._next_expiry, worker.routed[0][0])

    def _expire(self, worker: _WorkerBlocks, now: float) -> None:
        while worker.routed and worker.routed[0][0] <= now:
            _, digests = worker.routed.popleft()
            pending, gone = worker.pending, []
            for each in digests:  # some may be expected again, and later
                expiry = pending.get(each)
                if expiry is not None and expiry <= now:
                    del pending[each]
                    gone.append(each)
            self._expected.remove(worker.bit, gone)

    def _forget_pending(self, worker: _WorkerBlocks, digests: Iterable[bytes]) -> None:
        gone = [each for each in digests if worker.pending.pop(each, None) is not None]
        self._expected.remove(worker.bit, gone)
