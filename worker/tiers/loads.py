"""Decides when to load leading blocks of a prompt from this worker's own tiers, and loads them.

A request that is admitted has memory for its whole prompt before it loads. Its blocks stay pinned
until the load is over, however the request ends. Blocks on disk are read into host memory while the
request waits. What fails to load is computed. Belongs to the loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable

from kv_transfer.tiers.host_tier import Load
from kv_transfer.tiers.kv_tiers import KvTiers, Leading
from process.clock import Clock
from protocol.events import TierChange
from protocol.messages import TierName
from protocol.traces import FetchSpan
from scheduling.fetch_rule import ComputeCost, FetchChoice, PairCost, Run, weigh_fetch
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from worker.counters import Count, Counters
from worker.inbound.holders import DiskRead, Holders, holders_of

HOST, DISK = "host memory", "disk"
CHANGES_AT_ONCE = 400
"""Blocks that came into a tier, and that left it, in one report."""
TURN_S = 0.001
"""The time until the tier's thread begins, and until the loop learns that it is done."""


class TierLoads:
    """All loads of one worker. `resume` is called when a sequence has loaded what there was; it
    still counts as fetching."""

    def __init__(
        self, tiers: KvTiers | None, scheduler: Scheduler, counters: Counters, clock: Clock
    ) -> None:
        self.resume: Callable[[Sequence], None] = lambda _: None
        self._tiers = tiers
        self._scheduler = scheduler
        self._counters = counters
        self._clock = clock
        self._block_size = scheduler.config.block_size
        self._abandoned: list[Load] = []

    @property
    def is_on(self) -> bool:
        """Whether this worker has tiers."""
        return self._tiers is not None

    @property
    def blocks_abandoned(self) -> list[int]:
        """Blocks of requests that ended while the blocks were being loaded."""
        return [block for load in self._abandoned for block in load.blocks]

    def sizes(self) -> dict[str, int]:
        """What the tiers may hold, what they hold and how fast they are, by the fields of
        `WorkerStats`."""
        sizes: dict[str, int] = {}
        for name, tier in self._tiers.by_name.items() if self._tiers is not None else ():
            block_bytes = tier.counts.block_bytes
            sizes[f"{name}_tier_bytes"] = tier.index.num_slots * block_bytes
            sizes[f"{name}_tier_used_bytes"] = len(tier.index) * block_bytes
            block_us = 1e6 * block_bytes / tier.counts.bytes_per_s
            sizes[f"{name}_tier_block_us"] = max(1, round(block_us))
        return sizes

    def take_changes(self) -> list[TierChange]:
        """Changes of what the tiers hold since the last call; of many, some."""
        if self._tiers is None:
            return []
        news = self._tiers.take_news(CHANGES_AT_ONCE)
        return [
            TierChange(tier=TierName(name), stored=stored, removed=removed)
            for name, (stored, removed) in news.items()
            if stored or removed
        ]

    def hashes(self) -> dict[TierName, list[bytes]]:
        """The blocks that the tiers hold, as far as changes were told or will be."""
        if self._tiers is None:
            return {}
        tiers = self._tiers.by_name.items()
        return {TierName(name): tier.index.news.hashes() for name, tier in tiers}

    def turn(self) -> None:
        """Take note of what is over, and keep what the pool will evict."""
        if self._tiers is not None:
            self._tiers.turn(self._clock.now())
            self._count(self._tiers)

    # -- calls by the owner of all fetches -------------------------------------------------------

    def prepare(self, sequence: Sequence, holders: Holders) -> None:
        """Read from the disk what a new sequence will need of it, if that pays."""
        if self._tiers is None or not holders.may_load:
            return
        cached = len(self._scheduler.blocks.match(self._usable(sequence, 0)))
        hashes = self._usable(sequence, cached)
        found = self._tiers.find(hashes)
        sequence.is_hinted |= sum(found) > 0
        if not found.num_disk:
            return
        choice, now = self._weigh(cached, found), self._clock.now()
        hashes = hashes[: sum(found)]
        if choice.pays:
            read = DiskRead(self._clock.wall_us(), now + choice.deadline_s)
            if self._tiers.raise_blocks(hashes, read.note, now):
                holders.from_disk = read

    def choose(self, sequence: Sequence, num_cached: int) -> int | None:
        """See `scheduling.scheduler.FetchChooser`."""
        holders = holders_of(sequence)
        if self._tiers is None or holders is None or not holders.may_load:
            return 0
        hashes = self._usable(sequence, num_cached)
        number = self._tiers.num_ready(hashes)
        if self._awaits_disk(holders, hashes[number : number + 1]):
            return None
        return number if self._weigh(num_cached, Leading(number, 0)).pays else 0

    def try_begin(self, sequence: Sequence) -> bool:
        """Load blocks for a sequence that has its memory. Returns whether it pays."""
        first = sequence.num_computed // self._block_size
        number = self.choose(sequence, first)
        holders = holders_of(sequence)
        if not number or self._tiers is None or holders is None:
            return False
        self._scheduler.expect(sequence, number)
        span = slice(first, first + number)
        choice = self._weigh(first, Leading(number, 0))
        began_us = self._clock.wall_us()

        def over(num_loaded: int) -> None:
            if holders.load is not load:
                self._release(load, num_loaded)
                return
            holders.load = None
            if not sequence.num_preemptions:
                holders.spans += self._spans(holders, load, num_loaded, began_us, choice)
            self._counters.add(Count.LOADED_TOKENS, num_loaded * self._block_size)
            self._scheduler.fetched(sequence, num_loaded)
            self.resume(sequence)

        hashes, blocks = sequence.hashes[span], sequence.block_table[span]
        parent = sequence.hashes[first - 1] if first else None
        load = holders.load = Load(first, parent, hashes, blocks, over)
        self._tiers.load(load, self._clock.now())
        return True

    def drop(self, sequence: Sequence) -> None:
        """A sequence is about to end: its blocks stay pinned until nothing is copied into them."""
        holders = holders_of(sequence)
        if holders is None or holders.load is None:
            return
        load, holders.load = holders.load, None
        load.cancel()
        self._scheduler.detach(sequence, load.blocks)
        self._abandoned.append(load)

    # -- steps ------------------------------------------------------------------------------

    def _usable(self, sequence: Sequence, num_cached: int) -> list[bytes]:
        """The hashes behind the cached blocks; the last token is always computed."""
        return sequence.hashes[num_cached : (sequence.num_tokens - 1) // self._block_size]

    def _awaits_disk(self, holders: Holders, following: list[bytes]) -> bool:
        """Whether the first block that is not in host memory is worth waiting for."""
        read = holders.from_disk
        if self._tiers is None or read is None or not following:
            return False
        return self._tiers.is_coming(following[0]) and self._clock.now() < read.wait_until

    def _weigh(self, num_cached: int, found: Leading) -> FetchChoice:
        """Compare loading with computing. Blocks on disk take both ways, one after the other."""
        assert self._tiers is not None
        block_bytes = self._tiers.host.counts.block_bytes
        fixed, per_token, per_attended = self._scheduler.model.coefficients
        chunk = self._scheduler.config.chunk_max_tokens
        turn_s = TURN_S
        if found.num_disk and self._tiers.disk is not None:
            turn_s += found.num_disk * block_bytes / self._tiers.disk.counts.bytes_per_s
        return weigh_fetch(
            Run(sum(found), num_cached, self._block_size, block_bytes),
            0,
            ComputeCost(fixed, per_token, per_attended, chunk),
            PairCost(turn_s, self._tiers.host.counts.bytes_per_s),
            others_wait=self._scheduler.num_waiting > 1,
        )

    def _release(self, load: Load, num_loaded: int) -> None:
        """Nothing is copied any more into the blocks of a request that ended meanwhile. Those that
        arrived can be used by others."""
        self._abandoned.remove(load)
        parent = load.parent
        for block, digest in list(zip(load.blocks, load.hashes, strict=True))[:num_loaded]:
            self._scheduler.blocks.publish(block, digest, parent)
            parent = digest
        self._scheduler.blocks.release(load.blocks)

    def _spans(
        self, holders: Holders, load: Load, num_loaded: int, began_us: int, choice: FetchChoice
    ) -> list[FetchSpan]:
        """What came from which tier, in the order of the prompt as far as a tier's blocks follow
        each other. The disk's time is that of its reads."""
        read = holders.from_disk
        arrived = load.hashes[:num_loaded]
        of_disk = 0 if read is None else sum(each in read.seconds for each in arrived)
        of_host, done_us = num_loaded - of_disk, self._clock.wall_us()
        spans = []
        if of_disk and read is not None:
            read_s = sum(read.seconds.pop(each, 0.0) for each in arrived)
            spans.append((DISK, of_disk, of_disk, read.began_us, round(read_s * 1e6)))
        if of_host or num_loaded < len(load.hashes) or not of_disk:
            asked = len(load.hashes) - of_disk
            spans.append((HOST, asked, of_host, began_us, done_us - began_us))
        outcome = "" if num_loaded == len(load.hashes) else "failed"
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
