"""Decides when to fetch leading blocks, and from which of the workers that hold them; fetches them.

A request that is admitted here has memory for its whole prompt before it fetches. The blocks that
it grants to a holder stay pinned until their fence is released, however the request ends. Owns the
running fetches and the measurements of each pair of workers. Wrong hints cost time only.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.handoff.grants import WantedBlocks
from kv_transfer.handoff.incoming import FetchLimits
from kv_transfer.handoff.key import HandoffKey
from protocol.flight import FlightKind
from protocol.handoff_messages import GroupBlocks, KvClosed
from protocol.messages import KvHolder
from protocol.traces import FetchSpan
from scheduling.fetch_rule import ComputeCost, FetchChoice, Run, weigh_fetch
from scheduling.sequence import Sequence
from worker.counters import Count
from worker.host import WorkerHost
from worker.inbound.fetch_rates import FetchPairs, usual_speed
from worker.inbound.handoffs import InboundHandoffs
from worker.inbound.holders import Holders, holders_of
from worker.inbound.source_links import SourcePeers
from worker.moved_blocks import bytes_by_group

MAX_FETCHES = 4
"""The most fetches of one attempt. The worker computes the blocks that are missing after them."""
HOLDER_SHARE, ALL_SHARE = 1 / 4, 1 / 2
"""The parts of the pool that may be granted to one holder, and to all."""
CONNECT_WAIT_S = 0.25
STOP_WAIT_S = 0.5
MAX_UNCLOSED = 64
FIRST_FETCH_S = 0.5
"""The first fetch of a pair may take this much longer: its pools are being connected."""


@dataclass
class _Fetch:
    sequence: Sequence
    holders: Holders
    holder: KvHolder
    choice: FetchChoice
    first_block: int
    blocks: list[int]
    slots: list[GroupBlocks]  # slots of groups with windows
    sent_at: float
    sent_us: int
    closed: KvClosed | None = None

    @property
    def peer(self) -> str:
        return self.holder.peer.incarnation


class Fetches:
    """All fetches of this worker; belongs to the loop's thread."""

    def __init__(self, host: WorkerHost, inbound: InboundHandoffs, peers: SourcePeers) -> None:
        self._host = host
        self._clock = host.clock
        self._counters = host.counters
        self._scheduler = host.engine.scheduler
        self._layout = host.engine.layout
        self._block_bytes = bytes_by_group(self._layout)
        self._inbound = inbound
        self._peers = peers
        paths = (host.transfers.transport_name, *host.transfers.paths)
        self._pairs = FetchPairs(usual_speed(" ".join(paths)))
        self._fetches: dict[HandoffKey, _Fetch] = {}
        self._arrived: dict[HandoffKey, tuple[_Fetch, int, float]] = {}  # not closed yet
        self._scheduler.choose_fetch = self._choose_blocks
        inbound.fetch_owners.append(self)
        self._tiers = host.tiers
        self._tiers.resume = self.begin

    @property
    def num_open(self) -> int:
        """Fetches whose requests wait for them."""
        return len(self._fetches)

    # -- calls by the role ------------------------------------------------------------------

    def hint(self, sequence: Sequence, holders: list[KvHolder]) -> None:
        """Connect to the workers that probably have leading blocks of a new sequence, and ask our
        own tiers for its blocks."""
        may_load = self._tiers.is_on and not sequence.stays_in_pool
        if sequence.needs_prompt_logits or not (holders or may_load):
            return
        if self._layout.groups[0].window is not None:
            holders = []  # if all layers have windows, nobody holds leading blocks
            if not may_load:
                return
        connect_by = self._clock.now() + CONNECT_WAIT_S
        sequence.holders = notes = Holders(list(holders), connect_by, may_load=may_load)
        sequence.is_hinted = bool(holders)
        self._tiers.prepare(sequence, notes)
        for holder in holders:
            self._peers.connect(holder.peer)

    def begin(self, sequence: Sequence) -> None:
        """Load or fetch the next blocks of an admitted sequence, or compute it if neither pays."""
        if self._tiers.try_begin(sequence):
            return
        found = self._choose(sequence, sequence.num_computed // self._layout.block_size)
        number = 0 if found is None else found[1].num_blocks
        slots = self._scheduler.slots(sequence, number)
        if found is None or slots is None:
            self._scheduler.fetch_over(sequence)
        else:
            self._scheduler.expect(sequence, number)
            self._fetch(sequence, *found, slots)

    def drop(self, sequence: Sequence) -> None:
        """Give up the fetch of a sequence that is about to end. Its granted blocks stay fenced
        until the holder closes."""
        self._tiers.drop(sequence)
        holders = holders_of(sequence)
        if holders is None:
            return
        key, holders.left, holders.running = holders.running, [], None
        if key is not None:
            fetch = self._fetches.pop(key)
            self._leave_blocks(key, fetch, self._inbound.arrived(key))
            self._inbound.abort(key)

    # -- events of fetches ------------------------------------------------------------------

    def on_closed(self, key: HandoffKey, closed: KvClosed) -> None:
        """Note that the holder writes no more. A fetch whose blocks have all arrived is over
        already."""
        fetch = self._fetches.get(key)
        if fetch is not None:
            fetch.closed = closed
        elif (over := self._arrived.pop(key, None)) is not None:
            self._learn(*over, closed)

    def on_fetched(self, key: HandoffKey, num_blocks: int) -> None:
        """Use the `num_blocks` leading blocks that have arrived, and fetch or compute the rest."""
        fetch = self._fetches.pop(key, None)
        if fetch is None:
            return
        fetch.holders.running = None
        seconds = self._clock.now() - fetch.sent_at
        if fetch.closed is not None:
            self._learn(fetch, num_blocks, seconds, fetch.closed)
        else:
            self._arrived[key] = fetch, num_blocks, seconds
            if len(self._arrived) > MAX_UNCLOSED:
                del self._arrived[next(iter(self._arrived))]
        self._record(fetch, num_blocks, "" if num_blocks == len(fetch.blocks) else "stopped")
        self._counters.add(Count.FETCHED_TOKENS, num_blocks * self._layout.block_size)
        self._counters.add(Count.FETCH_MISSING_BLOCKS, len(fetch.blocks) - num_blocks)
        self._host.flight.note(FlightKind.FETCHED, key, number=num_blocks)
        self._scheduler.fetched(fetch.sequence, num_blocks)
        if num_blocks < len(fetch.blocks):
            fetch.holders.left.remove(fetch.holder)
        self.begin(fetch.sequence)

    def on_failed(self, key: HandoffKey, reason: str, arrived: tuple[int, ...]) -> None:
        """Let the sequence wait again. The holder may still write, so its blocks stay fenced."""
        fetch = self._fetches.pop(key, None)
        if fetch is None:
            return
        holders, peer = fetch.holders, fetch.peer
        holders.running = None
        holders.left = [each for each in holders.left if each.peer.incarnation != peer]
        self._record(fetch, len(arrived), reason)
        self._counters.add(Count.FETCHES_LEFT)
        self._host.flight.note(FlightKind.FETCH_LEFT, key, text=reason)
        self._leave_blocks(key, fetch, arrived)
        self._scheduler.leave(fetch.sequence)

    # -- steps ------------------------------------------------------------------------------

    def _leave_blocks(self, key: HandoffKey, fetch: _Fetch, arrived: tuple[int, ...]) -> None:
        """Fence the granted blocks; those that have arrived can be used already."""
        self._scheduler.publish_arrived(fetch.sequence, arrived)
        granted = [fetch.blocks, *(each.block_ids for each in fetch.slots)]
        for group, blocks in enumerate(granted):
            self._scheduler.detach(fetch.sequence, blocks, group)
        self._inbound.fenced.keep(key, granted)

    def _choose_blocks(self, sequence: Sequence, num_cached: int) -> int | None:
        """See `scheduling.scheduler.FetchChooser`. Blocks in our own tiers come first."""
        number = self._tiers.choose(sequence, num_cached)
        if number != 0:
            return number
        found = self._choose(sequence, num_cached)
        if found is not None:
            return found[1].num_blocks
        holders, now = holders_of(sequence), self._clock.now()
        if holders is None or now >= holders.connect_by:
            return 0
        may_come = any(
            self._peers.is_connecting(each.peer.incarnation)
            and self._weigh(sequence, each, num_cached, now).pays
            for each in holders.left
        )
        return None if may_come else 0

    def _choose(self, sequence: Sequence, num_cached: int) -> tuple[KvHolder, FetchChoice] | None:
        """The first holder that it pays to fetch from, beyond the `num_cached` blocks here."""
        holders, now = holders_of(sequence), self._clock.now()
        if holders is None or holders.num_fetches >= MAX_FETCHES:
            return None
        if self._host.lifecycle.is_draining:
            return None
        for holder in holders.left:
            if self._peers.is_answering(holder.peer.incarnation, now):
                choice = self._weigh(sequence, holder, num_cached, now)
                if choice.pays:
                    return holder, choice
        return None

    def _weigh(
        self, sequence: Sequence, holder: KvHolder, num_cached: int, now: float
    ) -> FetchChoice:
        size = self._layout.block_size
        usable = min(holder.num_blocks, (sequence.num_tokens - 1) // size)
        number = max(0, min(usable - num_cached, self._room_for(holder)))
        fixed, per_token, per_attended = self._scheduler.model.coefficients
        chunk = self._scheduler.config.chunk_max_tokens
        peer = holder.peer.incarnation
        run_bytes = self._scheduler.pools.run_bytes(number, self._block_bytes)
        return weigh_fetch(
            Run(number, num_cached, size, *run_bytes),
            self._num_granted(peer),
            ComputeCost(fixed, per_token, per_attended, chunk),
            self._pairs.cost(peer, now),
            others_wait=self._scheduler.num_waiting > 1,
        )

    def _num_granted(self, peer: str | None = None) -> int:
        return sum(len(each.blocks) for each in self._fetches.values() if peer in (None, each.peer))

    def _room_for(self, holder: KvHolder) -> int:
        """Blocks that may be granted to a holder now."""
        pool = self._scheduler.blocks.num_blocks
        of_holder = int(HOLDER_SHARE * pool) - self._num_granted(holder.peer.incarnation)
        return min(of_holder, int(ALL_SHARE * pool) - self._num_granted())

    def _fetch(
        self,
        sequence: Sequence,
        holder: KvHolder,
        choice: FetchChoice,
        slots: list[list[int]],
    ) -> None:
        holders = holders_of(sequence)
        assert holders is not None, "it was chosen among them"
        holders.num_fetches += 1
        key = HandoffKey(sequence.request_id, sequence.attempt, holders.num_fetches)
        holders.running = key
        first = sequence.num_computed // self._layout.block_size
        hashes = sequence.hashes[first : first + choice.num_blocks]
        blocks, others = (
            slots[0],
            [
                GroupBlocks(group=group, first_block=0, block_ids=each)
                for group, each in enumerate(slots[1:], 1)
            ],
        )
        now, now_us = self._clock.now(), self._clock.wall_us()
        fetch = _Fetch(sequence, holders, holder, choice, first, blocks, others, now, now_us)
        self._fetches[key] = fetch
        cost = self._pairs.cost(fetch.peer, now)
        extra_s = FIRST_FETCH_S if cost.connect_s else 0.0
        limits = FetchLimits(choice.deadline_s + extra_s, max(STOP_WAIT_S, 2 * cost.turn_s))
        self._counters.add(Count.FETCHES)
        self._host.flight.note(FlightKind.FETCH, key, number=len(blocks))
        pairs = list(zip(hashes, blocks, strict=True))
        self._inbound.fetch(key, fetch.peer, WantedBlocks(first, pairs, others), limits)

    def _learn(self, fetch: _Fetch, num_blocks: int, seconds: float, closed: KvClosed) -> None:
        """Update the measurements of the pair with a fetch that took `seconds`."""
        now, write_s = self._clock.now(), closed.write_us / 1e6
        self._pairs.note_found(fetch.peer, num_blocks, len(fetch.blocks), now)
        self._pairs.note_turn(fetch.peer, seconds - write_s, now)
        if num_blocks and write_s:
            of_block, of_windows = self._scheduler.pools.run_bytes(num_blocks, self._block_bytes)
            num_bytes = num_blocks * of_block + of_windows
            self._pairs.note_speed(fetch.peer, num_bytes, write_s, now)

    def _record(self, fetch: _Fetch, num_blocks: int, outcome: str) -> None:
        shortfall = None if fetch.closed is None else fetch.closed.why
        fetch.holders.spans.append(
            FetchSpan(
                holder=fetch.holder.peer.worker_id,
                first_block=fetch.first_block,
                asked=len(fetch.blocks),
                found=num_blocks,
                sent_us=fetch.sent_us,
                done_us=self._clock.wall_us(),
                outcome=outcome if shortfall is None else shortfall.value,
                fetch_us=round(fetch.choice.fetch_s * 1e6),
                compute_us=round(fetch.choice.compute_s * 1e6),
            )
        )
