"""Publishes a worker's load and the changes of its prefix cache; lists the whole cache on request.

Cache events are numbered without gaps and published before the load that they explain. A dump
carries the number of the last event that it includes, so that a router can apply later events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from engine.engine import Engine
from engine.rank_times import RankTime
from process.clock import wall_us
from process.host_load import HostLoad
from process.logs import log_counts
from process.open_files import FileRoom
from process.sockets.events import EventPublisher
from protocol.events import CacheEvents, TierChange, WorkerStats
from protocol.messages import CacheDump, TierName
from scheduling.load_report import load_report, step_counters
from worker.counters import Count, Counters


@dataclass(frozen=True)
class HandoffLoad:
    """The numbers of open handoffs, of ignored messages about unknown handoffs, and of blocks that
    are stuck, fenced or read by peers, as in `WorkerStats`."""

    num_open: int = 0
    num_ignored: int = 0
    blocks_stuck: int = 0
    blocks_fenced: int = 0
    blocks_serving: int = 0


class ReportedTiers(Protocol):
    """The tiers below the pool, as reports describe them."""

    def sizes(self) -> dict[str, int]:
        """Sizes and speeds, by the report's field."""

    def take_changes(self) -> list[TierChange]:
        """The blocks that the tiers have gained and lost since the last call."""

    def hashes(self) -> dict[TierName, list[bytes]]:
        """The blocks that the tiers hold."""


class NoTiers:
    """Stands for the tiers of a worker without any."""

    def sizes(self) -> dict[str, int]:
        """No sizes."""
        return {}

    def take_changes(self) -> list[TierChange]:
        """No changes."""
        return []

    def hashes(self) -> dict[TierName, list[bytes]]:
        """No blocks."""
        return {}


class Reporter:
    """One worker's publisher on the event plane. Every report has every `Count` of `counters`.

    Load is published when it has changed, at most every `interval_s` and at least every `idle_s`.
    """

    def __init__(
        self,
        engine: Engine,
        publisher: EventPublisher,
        worker_id: str,
        incarnation: str,
        interval_s: float,
        idle_s: float = 1.0,
    ) -> None:
        self.counters = Counters()
        self._engine = engine
        self._publisher = publisher
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._interval_s = interval_s
        self._idle_s = idle_s
        self._links: Callable[[], dict[str, int]] = dict
        self._received: Callable[[], dict[str, int]] = dict
        self._tiers: ReportedTiers = NoTiers()
        self._is_prefill_lost: Callable[[], bool] = lambda: False
        self._refusals: Callable[[], dict[str, str]] = dict
        self._rank_times: Sequence[RankTime] = ()
        self._seq = 0
        self.host_load = HostLoad()
        self._files = FileRoom()
        self._last = self.stats(HandoffLoad())
        self._last_at = float("-inf")

    def watch_links(self, links: Callable[[], dict[str, int]]) -> None:
        """Include in reports the bytes sent over each link, as `links` returns them."""
        self._links = links

    def watch_received(self, received: Callable[[], dict[str, int]]) -> None:
        """Include in reports the number of requests from each router's session, as `received`
        returns it."""
        self._received = received

    def watch_tiers(self, tiers: ReportedTiers) -> None:
        """Include the tiers in reports and in the list of the cache."""
        self._tiers = tiers

    def watch_prefill(self, is_lost: Callable[[], bool]) -> None:
        """Include in reports whether no prefill worker can be reached, as `is_lost` returns it."""
        self._is_prefill_lost = is_lost

    def watch_refusals(self, refusals: Callable[[], dict[str, str]]) -> None:
        """Include in reports the workers that refuse our pool, as `refusals` returns them."""
        self._refusals = refusals

    def reincarnate(self, incarnation: str) -> None:
        """Report as a new incarnation from now on."""
        self._incarnation = incarnation

    def publish(self, now: float, load: HandoffLoad) -> None:
        """Publish cache events, and the load if due."""
        self._publish_cache_events()
        if now - self._last_at < self._interval_s:
            return
        self._files.check()
        self.counters.set_cpu(self.host_load.totals(now))
        self.counters.set_log(log_counts())
        if (expert_loads := self._engine.expert_loads()) is not None:
            self.counters.set_expert_loads(expert_loads)
        self._set_rank_times()
        stats = self.stats(load)
        if stats == self._last and now - self._last_at < self._idle_s:
            return
        self._last, self._last_at = stats, now
        self._publisher.publish(msgspec.structs.replace(stats, reported_us=wall_us()))

    def stats(self, load: HandoffLoad) -> WorkerStats:
        """The current load."""
        scheduler = self._engine.scheduler
        counters = self.counters.values
        for name, number in step_counters(scheduler.model.totals).items():
            counters[Count(name)] = number
        return load_report(
            scheduler,
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            blocks_stuck=load.blocks_stuck,
            blocks_fenced=load.blocks_fenced,
            blocks_serving=load.blocks_serving,
            num_handoffs=load.num_open,
            cache_seq=self._seq,
            prefill_unreachable=int(self._is_prefill_lost()),
            refused_by=self._refusals(),
            received=self._received(),
            links=self._links(),
            rank_busy_us=tuple(each.busy_us for each in self._rank_times),
            rank_wait_us=tuple(each.wait_us for each in self._rank_times),
            **self._tiers.sizes(),
            counters={name.value: number for name, number in counters.items()},
        )

    def latest(self) -> WorkerStats:
        """The last reported load. May be called from any thread."""
        return self._last

    def dump(self) -> CacheDump:
        """Every block hash that can be matched now, and the hashes of blocks in the tiers, in one
        piece."""
        self._publish_cache_events()
        tiers = self._tiers.hashes()
        in_host, on_disk = tiers.get(TierName.HOST, []), tiers.get(TierName.DISK, [])
        return CacheDump(
            incarnation=self._incarnation,
            seq=self._seq,
            hashes=[*self._engine.scheduler.pools.hashes(), *in_host, *on_disk],
            num_host=len(in_host),
            num_disk=len(on_disk),
        )

    def _set_rank_times(self) -> None:
        engine = self._engine
        self._rank_times = engine.rank_times()
        if self._rank_times:
            self.counters.set_rank_times(
                self._rank_times, engine.layout.tp_size, engine.under_way_s
            )

    def _publish_cache_events(self) -> None:
        delta = self._engine.scheduler.pools.drain_events()
        tiers = self._tiers.take_changes()
        if not (delta.stored or delta.removed or tiers):
            return
        self._seq += 1
        self._publisher.publish(
            CacheEvents(
                worker_id=self._worker_id,
                incarnation=self._incarnation,
                seq=self._seq,
                stored=delta.stored,
                removed=delta.removed,
                tiers=tiers,
            )
        )
