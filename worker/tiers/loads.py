"""Decides when to load leading blocks of a prompt from this worker's own tiers, and loads them.

A request that is admitted has memory for its whole prompt before it loads. Its blocks stay pinned
until the load is over, however the request ends. Blocks on disk are read into host memory while the
request waits. Blocks that fail to load are computed. If layers keep windows, a prefix is loaded up
to an end at which all groups can go on; blocks of the prefix that the pool has after a gap are
copied. Belongs to the loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable

from kv_transfer.tiers.kv_tiers import KvTiers, WantedBlock
from process.clock import Clock
from protocol.events import TierChange
from protocol.messages import TierName
from protocol.traces import FetchSpan
from scheduling.block_pools import Has
from scheduling.fetch_rule import ComputeCost, FetchChoice, PairCost, Run, weigh_fetch
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from worker.counters import Count, Counters
from worker.inbound.holders import DiskRead, Holders, TierLoad, holders_of

HOST, DISK = "host memory", "disk"
CHANGES_AT_ONCE = 400
"""The most blocks in a report that came into a tier, and the most that left it."""
TURN_S = 0.001
"""The time until the tier's thread begins, plus the time until the loop learns that the thread is
done."""


class TierLoads:
    """All loads of one worker. `resume` is called when a sequence has loaded all available blocks;
    the sequence still counts as fetching then."""

    def __init__(
        self, tiers: KvTiers | None, scheduler: Scheduler, counters: Counters, clock: Clock
    ) -> None:
        self.resume: Callable[[Sequence], None] = lambda _: None
        self._tiers = tiers
        self._scheduler = scheduler
        self._pools = scheduler.pools
        self._counters = counters
        self._clock = clock
        self._block_size = scheduler.config.block_size
        self._abandoned: list[TierLoad] = []

    @property
    def is_on(self) -> bool:
        """Whether this worker has tiers."""
        return self._tiers is not None

    def blocks_abandoned(self, group: int = 0) -> list[int]:
        """The blocks of a group that belonged to requests which ended during a load of these
        blocks."""
        return [block for load in self._abandoned for block in load.slots[group]]

    def sizes(self) -> dict[str, int]:
        """The tiers' sizes, their contents in bytes and their speeds, by the fields of
        `WorkerStats`."""
        sizes: dict[str, int] = {}
        if self._tiers is None:
            return sizes
        for name, tier in self._tiers.by_name.items():
            unit_bytes = tier.counts.unit_bytes
            sizes[f"{name}_tier_bytes"] = tier.index.num_slots * unit_bytes
            sizes[f"{name}_tier_used_bytes"] = len(tier.index) * unit_bytes
            block_us = 1e6 * self._tiers.units.block_bytes[0] / tier.counts.bytes_per_s
            sizes[f"{name}_tier_block_us"] = max(1, round(block_us))
        return sizes

    def take_changes(self) -> list[TierChange]:
        """The changes of the tiers' contents since the last call, `CHANGES_AT_ONCE` at a time."""
        if self._tiers is None or self._pools.rules[0].window is not None:
            return []
        news = self._tiers.take_news(CHANGES_AT_ONCE)
        return [
            TierChange(tier=TierName(name), stored=stored, removed=removed)
            for name, (stored, removed) in news.items()
            if stored or removed
        ]

    def hashes(self) -> dict[TierName, list[bytes]]:
        """The blocks in the tiers that reports have named, or will name."""
        if self._tiers is None or self._pools.rules[0].window is not None:
            return {}
        tiers = self._tiers.by_name.items()
        return {TierName(name): tier.index.news.hashes() for name, tier in tiers}

    def turn(self) -> None:
        """Finish the copies that are done, and save the blocks that the pool evicts next."""
        if self._tiers is not None:
            self._tiers.turn(self._clock.now())
            self._count(self._tiers)

    # -- calls by the owner of all fetches -------------------------------------------------------

    def prepare(self, sequence: Sequence, holders: Holders) -> None:
        """Read the blocks that a new sequence will need from the disk, if that pays."""
        if self._tiers is None or not holders.may_load:
            return
        hashes = self._usable(sequence)
        cached = self._pools.match(hashes).num_blocks
        in_pool = self._in_pool()
        end = self._pools.reach(hashes, cached, _either(self._tiers.has, in_pool))
        sequence.is_hinted |= end > cached
        blocks = [
            (group, hashes[index])
            for group, needed in self._pools.needed(cached, end)
            for index in needed
            if not in_pool(group, hashes[index])
        ]
        num_disk = self._tiers.num_on_disk(blocks)
        if not num_disk:
            return
        choice, now = self._weigh(cached, end, num_disk), self._clock.now()
        if choice.pays:
            read = DiskRead(self._clock.wall_us(), now + choice.deadline_s)
            if self._tiers.raise_blocks(blocks, read.note, now):
                holders.from_disk = read

    def choose(self, sequence: Sequence, num_cached: int) -> int | None:
        """See `scheduling.scheduler.FetchChooser`."""
        holders = holders_of(sequence)
        if self._tiers is None or holders is None or not holders.may_load:
            return 0
        hashes, in_pool = self._usable(sequence), self._in_pool()
        end = self._pools.reach(hashes, num_cached, _either(self._tiers.is_ready, in_pool))
        if holders.from_disk is not None and self._clock.now() < holders.from_disk.wait_until:
            is_near = _either(self._tiers.is_near, in_pool)
            if self._pools.reach(hashes, num_cached, is_near) > end:
                return None
        return end - num_cached if self._weigh(num_cached, end).pays else 0

    def try_begin(self, sequence: Sequence) -> bool:
        """Load blocks for a sequence that has its memory. Returns whether it pays."""
        first = sequence.num_computed // self._block_size
        number = self.choose(sequence, first)
        holders = holders_of(sequence)
        slots = self._scheduler.slots(sequence, number or 0)
        if not number or slots is None or self._tiers is None or holders is None:
            return False
        self._scheduler.expect(sequence, number)
        end = first + number
        choice = self._weigh(first, end)
        began_us = self._clock.wall_us()
        needed = [each for _, each in self._pools.needed(first, end)]
        load = holders.load = TierLoad(first, sequence.hashes[:end], needed, slots)

        def over(num_arrived: int) -> None:
            num_loaded = number if num_arrived == len(wanted) else num_arrived
            if holders.load is not load:
                self._release(load, num_loaded)
                return
            holders.load = None
            if not sequence.num_preemptions:
                holders.spans += self._spans(holders, load, num_loaded, began_us, choice)
            self._counters.add(Count.LOADED_TOKENS, num_loaded * self._block_size)
            self._scheduler.fetched(sequence, num_loaded)
            self.resume(sequence)

        wanted = [
            WantedBlock(group, load.hashes[index], block)
            for group, (indices, blocks) in enumerate(zip(needed, slots, strict=True))
            for index, block in zip(indices, blocks, strict=True)
        ]
        load.copies = self._tiers.load(wanted, over, self._clock.now())
        return True

    def drop(self, sequence: Sequence) -> None:
        """Drop the load of a sequence that is about to end. Its blocks stay pinned until nothing is
        copied into them."""
        holders = holders_of(sequence)
        if holders is None or holders.load is None:
            return
        load, holders.load = holders.load, None
        if load.copies is not None:
            load.copies.cancel()
        for group, blocks in enumerate(load.slots):
            self._scheduler.detach(sequence, blocks, group)
        self._abandoned.append(load)

    # -- steps ------------------------------------------------------------------------------

    def _usable(self, sequence: Sequence) -> list[bytes]:
        """The hashes of the blocks that may be loaded; the last token is always computed."""
        return sequence.hashes[: (sequence.num_tokens - 1) // self._block_size]

    def _in_pool(self) -> Has:
        """A function that tells whether the pool has a block that is to be copied."""
        if not self._pools.has_windows:
            return lambda _group, _digest: False
        managers = self._pools.managers
        under_way = [self._scheduler.blocks_under_way(group) for group in range(len(managers))]

        def has(group: int, digest: bytes) -> bool:
            found = managers[group].find(digest)
            return found is not None and found.block not in under_way[group]

        return has

    def _weigh(self, first: int, end: int, num_disk: int = 0) -> FetchChoice:
        """Compare loading the blocks from `first` to `end` with computing. The `num_disk` units on
        disk take both ways, one after the other."""
        assert self._tiers is not None
        fixed, per_token, per_attended = self._scheduler.model.coefficients
        chunk = self._scheduler.config.chunk_max_tokens
        turn_s = TURN_S
        if num_disk and self._tiers.disk is not None:
            counts = self._tiers.disk.counts
            turn_s += num_disk * counts.unit_bytes / counts.bytes_per_s
        run_bytes = self._pools.run_bytes(end - first, self._tiers.units.block_bytes)
        return weigh_fetch(
            Run(end - first, first, self._block_size, *run_bytes),
            0,
            ComputeCost(fixed, per_token, per_attended, chunk),
            PairCost(turn_s, self._tiers.host.counts.bytes_per_s),
            others_wait=self._scheduler.num_waiting > 1,
        )

    def _release(self, load: TierLoad, num_loaded: int) -> None:
        """Release the blocks of a request that ended during its load: nothing is copied into them
        any more. Other requests can use the blocks that arrived."""
        self._abandoned.remove(load)
        end, hashes = load.first_block + num_loaded, load.hashes
        groups = zip(self._pools.managers, load.needed, load.slots, strict=True)
        for manager, needed, blocks in groups:
            for index, block in zip(needed, blocks, strict=True):
                if index < end:
                    manager.publish(block, hashes[index], hashes[index - 1] if index else None)
            manager.release(blocks)

    def _spans(
        self, holders: Holders, load: TierLoad, num_loaded: int, began_us: int, choice: FetchChoice
    ) -> list[FetchSpan]:
        """The loaded blocks by tier: one span for each run of blocks from the same tier, in the
        order of the prompt. The disk's time is that of its reads."""
        read = holders.from_disk
        asked_hashes = load.hashes[load.first_block :]
        arrived = asked_hashes[:num_loaded]
        of_disk = 0 if read is None else sum(each in read.seconds for each in arrived)
        of_host, done_us = num_loaded - of_disk, self._clock.wall_us()
        spans = []
        if of_disk and read is not None:
            read_s = sum(read.seconds.pop(each, 0.0) for each in arrived)
            spans.append((DISK, of_disk, of_disk, read.began_us, round(read_s * 1e6)))
        if of_host or num_loaded < len(asked_hashes) or not of_disk:
            asked = len(asked_hashes) - of_disk
            spans.append((HOST, asked, of_host, began_us, done_us - began_us))
        outcome = "" if num_loaded == len(asked_hashes) else "failed"
        return [
            FetchSpan(
                holder="",
                first_block=load.first_block,
                asked=asked,
                found=found,
                sent_us=since_us,
                done_us=since_us + took_us,
                outcome=outcome,
                fetch_us=round(choice.fetch_s * 1e6),
                compute_us=round(choice.compute_s * 1e6),
                tier=tier,
            )
            for tier, asked, found, since_us, took_us in spans
        ]

    def _count(self, tiers: KvTiers) -> None:
        """Bring the worker's counters up to date."""
        for name, tier in tiers.by_name.items():
            counts = tier.counts
            for what, total in (
                ("loaded_bytes", counts.loaded_bytes),
                ("stored_bytes", counts.stored_bytes),
                ("evicted_blocks", tier.index.num_evicted),
                ("failures", counts.num_failures),
            ):
                self._counters.add_up_to(Count(f"{name}_tier_{what}"), f"{name} {what}", total)
        missed = tiers.host.counts.num_missed
        self._counters.add_up_to(Count.HOST_TIER_MISSED_BLOCKS, "host missed", missed)


def _either(one: Has, other: Has) -> Has:
    return lambda group, digest: one(group, digest) or other(group, digest)
