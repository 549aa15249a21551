"""Takes over cached blocks of workers that drain: fetches without a request.

One prefix at a time, in parts, and only while no request waits here. The blocks are free ones of
our pool. They are pinned while the holder writes a part, then cached like the blocks that a request
leaves behind. If a fetch fails, its blocks stay fenced, as in any fetch. Nothing is pinned between
two parts, and a part waits for nothing but writes, so this adds no wait of memory for memory.

If layers keep windows or states, the last part of a prefix also brings the blocks that all windows
see from its end, and the states there. This part is at least as long as the windows, so no earlier
windowed block is needed. The other parts bring only blocks of layers that keep all tokens.
"""

from __future__ import annotations

import logging
import math
import uuid
from dataclasses import dataclass, field

from kv_transfer.handoff.grants import WantedBlocks
from kv_transfer.handoff.incoming import FetchLimits
from kv_transfer.handoff.key import HandoffKey
from kv_transfer.handoff.outgoing import GroupedBlocks
from protocol.handoff_messages import (
    CacheAsk,
    CachedPrefix,
    FetchShortfall,
    GroupBlocks,
    KvClosed,
)
from protocol.messages import KvPeer
from worker.counters import Count
from worker.host import WorkerHost
from worker.inbound.handoffs import InboundHandoffs
from worker.inbound.source_links import SourcePeers
from worker.moved_blocks import bytes_by_group

log = logging.getLogger(__name__)

EVICTED_SHARE = 1 / 2
"""The part of our own cached blocks that blocks of one draining worker may evict."""
PART_BYTES = 16 << 20
PART_SHARE = 1 / 8
"""A part has at most this many bytes, and takes at most this part of the pool."""
PART_LIMITS = FetchLimits(deadline_s=2.0, stop_wait_s=0.5)
BUSY_PAUSE_S = 0.02
MOST_BUSY = 100
"""After this many answers in a row without a block, a part is given up."""
LOOK_S = 5.0
"""How long to look for a worker that offers its cache but is not in our view of the fleet."""


@dataclass
class _Offer:
    """A worker that drains, and the blocks that we have taken from it.

    While a part is fetched, `held` are the pinned leading blocks of `prefix` in the first group.
    `granted` are, by group, the blocks that the holder writes: in the first group the blocks after
    `held`, in the others slots (see `KvFetch`). `num_left` blocks may still be taken. Blocks of
    other groups count as the number of blocks of the first group that fit into their memory.
    """

    peer: KvPeer
    name: str = field(default_factory=lambda: f"cache-{uuid.uuid4().hex}")
    num_left: int | None = None  # None before the first question
    is_asked: bool = False
    prefix: list[bytes] = field(default_factory=list)
    stays_in_pool: bool = False
    held: list[int] = field(default_factory=list)
    granted: list[list[int]] = field(default_factory=list)
    num_parts: int = 0
    num_busy: int = 0
    why: FetchShortfall | None = None
    next_part_at: float = 0.0
    num_taken: int = 0

    @property
    def key(self) -> HandoffKey:
        """The key of the newest part."""
        return HandoffKey(self.name, 0, self.num_parts)


class TakenCaches:
    """The caches that this worker takes over; belongs to the loop's thread. See `FetchOwner`."""

    def __init__(self, host: WorkerHost, inbound: InboundHandoffs, peers: SourcePeers) -> None:
        self._host = host
        self._clock = host.clock
        self._scheduler = host.engine.scheduler
        self._blocks = host.engine.scheduler.blocks
        self._pools = host.engine.scheduler.pools
        self._block_bytes = bytes_by_group(host.engine.layout)[0]
        windows = [rule for rule in self._pools.rules if rule.window is not None]
        self._reach = max((rule.cover for rule in windows), default=0)
        first = self._pools.rules[0].blocks_per_page
        pages = (rule.cover / rule.blocks_per_page for rule in windows)
        self._end_blocks = math.ceil(first * sum(pages))
        """The memory that the windows and states at a prefix's end take, in blocks of the first
        group."""
        self._inbound = inbound
        self._peers = peers
        self._offers: dict[str, _Offer] = {}  # by incarnation
        self._current: _Offer | None = None  # the offer whose prefix is being taken
        self._unknown: dict[str, float] = {}  # offers of workers not seen yet: until when to look
        inbound.fetch_owners.append(self)

    def blocks(self, group: int = 0) -> list[int]:
        """The blocks of a group that are pinned now; fenced ones are not among them."""
        found = [] if group else [block for each in self._offers.values() for block in each.held]
        for each in self._offers.values():
            found += each.granted[group] if each.granted else []
        return found

    def offer(self, worker_id: str) -> None:
        """Note that a worker drains and offers its cache. Our view of the fleet may not list the
        worker yet."""
        self._unknown[worker_id] = self._clock.now() + LOOK_S
        self._find_unknown()

    def take(self, incarnation: str, answer: CachedPrefix) -> None:
        """Take the worker's answer: the worker names a prefix, or has no more."""
        offer = self._offers.get(incarnation)
        if offer is None or not offer.is_asked:
            self._host.note_unexpected(incarnation, answer)
            return
        offer.is_asked = False
        if answer.hashes:
            offer.prefix, offer.stays_in_pool = answer.hashes, answer.stays_in_pool
        else:
            self._finish(offer)

    def _find_unknown(self) -> None:
        """Connect to the workers that offered their caches and are in the fleet now."""
        for worker_id, until in list(self._unknown.items()):
            peer = self._peers.leaving(worker_id)
            if peer is not None and peer.incarnation not in self._offers:
                self._peers.connect(peer, is_leaving=True)
                self._offers[peer.incarnation] = _Offer(peer)
            if peer is not None or self._clock.now() >= until:
                del self._unknown[worker_id]

    def sweep(self) -> None:
        """Ask, and fetch the next part, if no request needs this worker."""
        if self._unknown:
            self._find_unknown()
        lifecycle, now = self._host.lifecycle, self._clock.now()
        for offer in list(self._offers.values()):
            if lifecycle.is_draining or lifecycle.has_lapsed:
                self._peers.send(offer.peer.incarnation, CacheAsk(num_blocks=0))
                self._finish(offer)
            elif self._is_gone(offer, now):
                self._finish(offer)
            elif not self._scheduler.num_waiting and not offer.granted:
                self._take_more(offer, now)

    # -- events: see `FetchOwner` -------------------------------------------------------------

    def on_closed(self, key: HandoffKey, closed: KvClosed) -> None:
        """The holder says why it did not write all blocks."""
        offer = self._offer_of(key)
        if offer is not None:
            offer.why = closed.why

    def on_fetched(self, key: HandoffKey, num_blocks: int) -> None:
        """Cache the blocks of a part that is over, and continue with the next part."""
        offer = self._offer_of(key)
        if offer is None:
            return
        granted, offer.granted = offer.granted, []
        self._cache(offer, granted[0][:num_blocks])
        self._cache_windows(offer, granted, num_blocks)
        num_here, num_missing = len(offer.held) + num_blocks, len(granted[0]) - num_blocks
        self._release(offer, granted)
        num_used = num_blocks + (self._end_blocks if num_blocks and any(granted[1:]) else 0)
        offer.num_left = max(0, (offer.num_left or 0) - num_used)
        offer.num_busy = 0 if num_blocks else offer.num_busy + 1
        if num_missing and offer.why is FetchShortfall.BUSY and offer.num_busy < MOST_BUSY:
            offer.next_part_at = self._clock.now() + BUSY_PAUSE_S
        elif num_missing or num_here == len(offer.prefix):
            self._leave_prefix(offer)

    def on_failed(self, key: HandoffKey, reason: str, arrived: tuple[int, ...]) -> None:
        """The holder may still write to the blocks of this part: take no more from it."""
        offer = self._offer_of(key)
        if offer is None:
            return
        num_leading = 0
        while len(offer.held) + num_leading in arrived:
            num_leading += 1
        self._cache(offer, offer.granted[0][:num_leading])
        self._inbound.fenced.keep(key, offer.granted)
        offer.granted = []
        log.info("no more blocks are taken from %s: %s", offer.peer.worker_id, reason)
        self._finish(offer)

    # -- steps ------------------------------------------------------------------------------

    def _take_more(self, offer: _Offer, now: float) -> None:
        """Ask for the next prefix, or fetch the next part of this one."""
        if offer.prefix:
            if self._current in (None, offer) and now >= offer.next_part_at:
                self._fetch_part(offer)
        elif not offer.is_asked:
            room = self._room()
            offer.num_left = room if offer.num_left is None else min(room, offer.num_left)
            offer.is_asked = True
            wanted = max(0, offer.num_left - self._end_blocks)
            self._peers.send(offer.peer.incarnation, CacheAsk(num_blocks=wanted))
            if not wanted:
                self._finish(offer)

    def _fetch_part(self, offer: _Offer) -> None:
        self._current = offer
        first, counts = self._next_part(offer)
        offer.held = self._blocks.match(offer.prefix[:first])
        self._blocks.pin(offer.held)
        if not counts[0] or not self._pools.fits(self._pools.nothing, counts, self._num_claimed):
            self._leave_prefix(offer)
            return
        offer.granted = self._pools.take(self._pools.nothing, counts)
        offer.num_parts += 1
        offer.why = None
        hashes = offer.prefix[first : first + counts[0]]
        pairs = list(zip(hashes, offer.granted[0], strict=True))
        others = [
            GroupBlocks(group=group, first_block=0, block_ids=slots)
            for group, slots in enumerate(offer.granted[1:], 1)
        ]
        wanted = WantedBlocks(first, pairs, others)
        self._inbound.fetch(offer.key, offer.peer.incarnation, wanted, PART_LIMITS)

    def _next_part(self, offer: _Offer) -> tuple[int, list[int]]:
        """The first block of the next part of a prefix, and by group how many blocks it has: none
        if the prefix is all here, or there is no room for the rest."""
        rules, end = self._pools.rules[1:], len(offer.prefix)
        first, tail = len(self._blocks.match(offer.prefix)), max(0, end - self._reach)
        room = min(offer.num_left or 0, self._num_spare())
        if first < tail or not rules:
            most = min(
                max(1, PART_BYTES // self._block_bytes),
                max(1, int(PART_SHARE * self._blocks.num_blocks)),
                room,
                tail - first,
            )
            return first, [most, *(0 for _ in rules)]
        is_here = self._pools.match(offer.prefix).num_blocks == end
        if is_here or end - tail > room:
            return first, [0, *(0 for _ in rules)]
        return tail, [end - tail, *(min(rule.cover, end - tail) for rule in rules)]

    def _cache(self, offer: _Offer, blocks: list[int]) -> None:
        """Cache blocks that have arrived; they follow the held ones."""
        for index, block in enumerate(blocks, len(offer.held)):
            parent = offer.prefix[index - 1] if index else None
            self._blocks.publish(block, offer.prefix[index], parent, offer.stays_in_pool)
        offer.num_taken += len(blocks)
        self._host.counters.add(Count.TAKEN_BLOCKS, len(blocks))

    def _cache_windows(self, offer: _Offer, granted: GroupedBlocks, num_blocks: int) -> None:
        """Cache the blocks that windows see from the end of the `num_blocks` blocks that have
        arrived."""
        for manager, slots in zip(self._pools.managers[1:], granted[1:], strict=True):
            filled = slots[:num_blocks]
            for index, block in enumerate(filled, len(offer.held) + num_blocks - len(filled)):
                parent = offer.prefix[index - 1] if index else None
                manager.publish(block, offer.prefix[index], parent, offer.stays_in_pool)

    def _release(self, offer: _Offer, granted: GroupedBlocks = ()) -> None:
        """Release the blocks of a part that is over, and the held ones, so that requests may have
        them."""
        self._blocks.release([*offer.held, *(granted[0] if granted else ())])
        for manager, slots in zip(self._pools.managers[1:], granted[1:], strict=False):
            manager.release(slots)
        offer.held = []

    def _leave_prefix(self, offer: _Offer) -> None:
        self._release(offer)
        offer.prefix = []
        self._current = None if self._current is offer else self._current

    def _finish(self, offer: _Offer) -> None:
        """Take no more from a worker. Blocks that it may still write to stay fenced."""
        del self._offers[offer.peer.incarnation]
        self._leave_prefix(offer)
        if offer.granted:
            self._inbound.fenced.keep(offer.key, offer.granted)
            self._inbound.abort(offer.key)
        if offer.num_taken:
            log.info("%d cached blocks of %s are kept", offer.num_taken, offer.peer.worker_id)

    def _offer_of(self, key: HandoffKey) -> _Offer | None:
        """The offer whose newest part this is, while it is being fetched."""
        offer = self._current
        return offer if offer is not None and offer.granted and offer.key == key else None

    def _is_gone(self, offer: _Offer, now: float) -> bool:
        """Whether the worker cannot answer any more. A part that is being fetched has a deadline of
        its own."""
        peer = offer.peer.incarnation
        is_there = self._peers.is_connecting(peer) or self._peers.is_answering(peer, now)
        return not offer.granted and not is_there

    def _num_spare(self) -> int:
        """Free blocks that neither waiting nor running requests will need soon."""
        return max(0, self._blocks.num_free - self._num_claimed)

    @property
    def _num_claimed(self) -> int:
        """Free blocks that waiting and running requests will need."""
        scheduler = self._scheduler
        headroom = scheduler.config.headroom_per_sequence * scheduler.num_running
        return scheduler.roster.blocks_waiting + headroom

    def _room(self) -> int:
        """Blocks that may be taken: empty ones, and some that hold the prefixes used least."""
        kept = int((1 - EVICTED_SHARE) * self._pools.num_cached_free)
        return max(0, self._num_spare() - kept)
