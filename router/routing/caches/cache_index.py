"""Which KV blocks each worker holds, according to its published events.

Owns one set of block hashes per worker, updated by numbered `CacheEvents` on top of a `CacheDump`,
which comes in pieces, and one index from hash to workers. Knows no sockets: it reports when a dump
is needed, and the caller sends its requests. The index is a hint for placement; a worker's own
cache decides. Invariants: after a missing event, which the next event or load report reveals, a
worker's blocks stay a hint until a dump has come. An event counts only if it comes from the same
incarnation. The blocks of a newly routed prompt count as expected, not as held, so that a burst of
equal prompts goes to the same worker as the first one. A worker whose layers keep windows also
reports where cached prefixes can end: only its blocks up to the last such end count. Long lists are
indexed, and forgotten, slice by slice (`router.routing.caches.block_lists`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import NoReturn

import msgspec

from process.number_text import count
from protocol.errors import ProtocolError
from protocol.events import CacheEvents
from protocol.hashing import end_of
from protocol.messages import CacheDump, CacheDumpRequest
from router.routing.caches.block_holders import BlockHolders, by_worker
from router.routing.caches.block_lists import BlockLists
from router.routing.caches.expected_blocks import ExpectedBlocks
from router.routing.caches.tier_blocks import TierBlocks
from router.routing.caches.worker_blocks import MAX_RETRY_S, RETRY_S, Listed, WorkerBlocks

MAX_BUFFERED_EVENTS = 4096
MOST_IN_TIERS = 1 << 18
"""The most blocks in a worker's tiers that the index holds."""
MAX_BLOCKS = 1 << 23
"""The most blocks of a worker that the index holds, whatever number the worker has registered."""


class PrefixMatch(msgspec.Struct, frozen=True, gc=False):
    """Leading blocks of a prompt: `held` in a worker's pool now, `expected` once routed prompts are
    computed. The blocks that follow the held ones are in the worker's tiers: `in_host` blocks in
    host memory, then `on_disk` blocks on disk."""

    held: int
    expected: int
    in_host: int = 0
    on_disk: int = 0

    @property
    def num_own(self) -> int:
        """Leading blocks that the worker need not compute, in its pool or a tier."""
        return self.held + self.in_host + self.on_disk


NO_MATCH = PrefixMatch(0, 0)


def _all_held(num_blocks: int) -> PrefixMatch:
    return PrefixMatch(num_blocks, num_blocks)


def _only_expected(num_blocks: int) -> PrefixMatch:
    return PrefixMatch(0, num_blocks)


KEPT_ENDS = 2
"""The number of ends, the last ones, that a worker with windows keeps of each prompt that it
computes."""


class CacheIndex:
    """The blocks of every worker of the fleet. `now` is any monotonic clock, in seconds."""

    def __init__(self, pending_ttl_s: float) -> None:
        self._workers: dict[str, WorkerBlocks] = {}
        self._held = BlockHolders()
        self._tiers = TierBlocks()
        self._expected = ExpectedBlocks(pending_ttl_s)
        self._lists = BlockLists(self._held, self._tiers, self._expected, self._free)
        self._free_bits: list[int] = []
        self._num_bits = 0
        self._everybody = 0  # the bits of all workers
        self._windowed = 0  # the bits of workers whose layers keep windows
        self._names: dict[int, str] = {}  # by bit
        self.gaps = 0

    def join(
        self,
        worker_id: str,
        incarnation: str,
        num_blocks: int = MAX_BLOCKS,
        has_windows: bool = False,
    ) -> None:
        """Follow a worker with `num_blocks` blocks, of which none is known yet; the caller
        requests a dump from it."""
        self.leave(worker_id)
        if not self._free_bits:
            self._free_bits.append(1 << self._num_bits)
            self._num_bits += 1
        bit = self._free_bits.pop()
        self._workers[worker_id] = WorkerBlocks(incarnation, bit, 2 * min(num_blocks, MAX_BLOCKS))
        self._everybody |= bit
        self._windowed |= bit if has_windows else 0
        self._names[bit] = worker_id

    def leave(self, worker_id: str) -> None:
        """Forget a worker."""
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            self._everybody &= ~worker.bit
            self._windowed &= ~worker.bit
            self._lists.leave(worker)

    def apply_events(self, events: CacheEvents) -> bool:
        """Take one event; True if the caller must request a dump because events are missing.
        Raises ProtocolError if the worker reports more blocks than it can have."""
        worker = self._workers.get(events.worker_id)
        if worker is None or worker.incarnation != events.incarnation:
            return False
        if worker.seq is None:
            if worker.coming is None:
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
        """Apply a whole dump and the events that follow it; True if another one is needed. A long
        dump is applied by later calls of `tidy`, and then `overdue` tells if another one is
        needed."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.incarnation != dump.incarnation:
            return False
        if worker.seq is not None and dump.seq < worker.seq:
            return False
        worker.seq = None

        def take_over(listed: Listed) -> None:
            self._take_over(worker, listed, dump.seq)

        self._lists.take(worker, dump, take_over)
        return worker.seq is None and worker.coming is None

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
            if worker.seq is not None or worker.coming is not None:
                continue
            if worker.retry_at is None:
                worker.retry_at = now + worker.retry_s
            elif now >= worker.retry_at:
                worker.retry_s = min(2 * worker.retry_s, MAX_RETRY_S)
                worker.retry_at = now + worker.retry_s
                found.append(worker_id)
        return found

    def tidy(self, now: float) -> bool:
        """Change the index for the next slice of a long list, and drop expired expectations. Call
        it periodically. Returns whether to call it again soon, because there are more slices."""
        self._expected.expire(self._workers.values(), now)
        if self._lists:
            with suppress(ProtocolError):  # the worker is asked for another dump
                self._lists.go_on()
        return len(self._lists) > 0

    def expect(self, worker_id: str, hashes: Sequence[bytes], now: float) -> None:
        """Expect these blocks of a routed prompt on a worker; the expectation expires."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        if worker.bit & self._windowed:
            hashes = [*hashes, *map(end_of, hashes[-KEPT_ENDS:])]
        self._expected.add(worker, hashes, now)

    def matches(self, hashes: Sequence[bytes], now: float) -> dict[str, PrefixMatch]:
        """The number of leading blocks of a prompt that each worker holds now and will soon hold,
        for workers that hold any. Beyond the first `EXACT_BLOCKS` blocks, holes may be
        overlooked."""
        if not hashes:
            return {}
        self._expected.expire(self._workers.values(), now)
        found = self._pool_matches(hashes)
        if self._tiers.has_any:
            held = {bit: each.held for bit, each in found.items()}
            for bit, own in self._tiers.beyond(hashes, self._held, held, self._windowed).items():
                match = found.get(bit, NO_MATCH)
                found[bit] = PrefixMatch(match.held, match.expected, own.in_host, own.on_disk)
        return {self._names[bit]: each for bit, each in found.items()}

    def _pool_matches(self, hashes: Sequence[bytes]) -> dict[int, PrefixMatch]:
        """The matches in pools, by the bit of the worker."""
        first, everybody = hashes[0], self._everybody
        if not self._held.of(first) & everybody:
            expecting = self._expected.masks.of(first) & everybody
            if not expecting:
                return {}  # a new prompt, which is a frequent case
            runs = self._held.runs(hashes, expecting, also=self._expected.masks)
            found = by_worker(runs, _only_expected)
            return self._usable(hashes, found) if self._windowed else found
        runs = self._held.runs(hashes, everybody)
        expecting = self._expecting()
        if runs[-1].num_blocks == len(hashes):
            expecting &= ~runs[-1].workers
        found = by_worker(runs, _all_held)
        if expecting:
            start = next(each.num_blocks for each in runs if each.workers & expecting)
            soon = by_worker(
                self._held.runs(hashes, expecting, start, also=self._expected.masks), int
            )
            for bit, count in soon.items():
                found[bit] = PrefixMatch(found.get(bit, NO_MATCH).held, count)
        return self._usable(hashes, found) if self._windowed else found

    def _expecting(self) -> int:
        """The workers where blocks are expected."""
        if not self._expected.masks:
            return 0
        return sum([each.bit for each in self._workers.values() if each.pending])

    def _usable(
        self, hashes: Sequence[bytes], found: dict[int, PrefixMatch]
    ) -> dict[int, PrefixMatch]:
        """The usable blocks: all, or those up to the last end."""
        for bit in [each for each in found if each & self._windowed]:
            held = self._held.last_end(hashes[: found[bit].held], bit)
            expected = hashes[: found[bit].expected]
            soon = self._held.last_end(expected, bit, also=self._expected.masks)
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

    def _apply(self, worker: WorkerBlocks, events: CacheEvents) -> None:
        if len(worker.hashes) + len(events.stored) > worker.most:
            self._disbelieve(worker)
        if events.tiers:
            self._tiers.apply(worker.bit, events.tiers)
            if self._tiers.num_blocks(worker.bit) > MOST_IN_TIERS:
                self._disbelieve(worker)
        worker.hashes.difference_update(events.removed)
        worker.hashes.update(events.stored)
        self._held.remove(worker.bit, events.removed)
        self._held.add(worker.bit, events.stored)
        if worker.pending:
            self._expected.forget(worker, chain(events.removed, events.stored))

    def _disbelieve(self, worker: WorkerBlocks) -> NoReturn:
        """Forget what a worker has reported, which cannot be true. A missed event may explain some
        surplus blocks, but not as many as the pool has."""
        worker.seq, worker.buffer, worker.gathered = None, [], []
        self._lists.empty(worker)
        raise ProtocolError(
            f"it reports more than {count(worker.most, 'block')}, or {MOST_IN_TIERS} in tiers"
        )

    @staticmethod
    def _hold(worker: WorkerBlocks, events: CacheEvents) -> bool:
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

    def _lose_track(self, worker: WorkerBlocks, events: CacheEvents | None = None) -> bool:
        """Keep the blocks as a hint until the next dump, because an event is missing and some of
        the blocks may be wrong."""
        self.gaps += 1
        worker.seq = None
        worker.buffer = []
        if events is not None:
            self._hold(worker, events)
        return True

    def _take_over(self, worker: WorkerBlocks, listed: Listed, seq: int) -> None:
        """Use a whole dump that is indexed, and apply the events that follow it."""
        self._lists.put(worker, listed)
        waiting, worker.buffer = worker.buffer, []
        worker.seq, worker.retry_at, worker.retry_s = seq, None, RETRY_S
        self._expected.forget(worker, [each for each in worker.pending if each in worker.hashes])
        for events in sorted(waiting, key=lambda each: each.seq):
            self.apply_events(events)

    def _free(self, worker: WorkerBlocks) -> None:
        self._free_bits.append(worker.bit)
