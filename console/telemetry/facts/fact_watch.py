"""Collects the facts of a router's fleet, once per second.

Owns the times since which the store is in trouble and pairs cannot hand over, and the counts of
ended requests by key. Reads the fleet, traces, the door and other routers' summaries.
"""

from __future__ import annotations

import time

from console.doctor.facts import ApartFacts, Facts, StoreFacts, WorkerStanding
from console.telemetry.facts.failing_tiers import TierWatch
from console.telemetry.facts.host_cpu import HostWatch
from console.telemetry.facts.keys import KeyWindow, key_facts
from console.telemetry.facts.loop_lag import LoopLag
from console.telemetry.facts.lost_logs import LogWatch
from console.telemetry.facts.router_presence import RouterPresence
from http_kit.door import Door
from process.host_load import HostLoad
from process.logs import log_counts
from protocol.registration import WorkerInfo
from router.fleet.conditions import Condition
from router.fleet.fleet import Fleet
from router.fleet.worker import Worker
from router.requests.trace_store import TraceStore

MAX_APART = 1024
"""The most pairs that cannot hand over in the facts."""


class FactWatch:
    """The facts of the last `sample`."""

    def __init__(
        self, fleet: Fleet, traces: TraceStore, door: Door, routers: RouterPresence
    ) -> None:
        self.keys = KeyWindow(traces.wall_us)
        self.loop = LoopLag()
        self.latest = Facts()
        self._fleet, self._traces, self._door, self._routers = fleet, traces, door, routers
        self._hosts, self._logs, self._tiers = HostWatch(), LogWatch(), TierWatch()
        self._host_load = HostLoad()
        self._store_since_us = 0
        self._apart_since_us: dict[tuple[str, str], int] = {}

    def sample(self, ttft_target_ms: float) -> Facts:
        """Collect the current facts."""
        now_us = self._traces.wall_us()
        cpu = self._host_load.totals(time.monotonic())
        self._hosts.sample(self._fleet.workers(), cpu, now_us)
        self._logs.sample(self._fleet.workers(), log_counts(), now_us)
        self._tiers.sample(self._fleet.workers(), now_us)
        self.latest = Facts(
            workers=self._standings(),
            keys=key_facts(self.keys, self._door, self._traces, ttft_target_ms),
            store=self._store(now_us),
            routers=self._routers.missed(),
            hosts=self._hosts.facts(),
            logs=self._logs.facts(),
            tiers=self._tiers.facts(),
            loop=self.loop.facts(),
            apart=self._apart(now_us),
        )
        return self.latest

    def _standings(self) -> tuple[WorkerStanding, ...]:
        found = []
        for worker_id, condition in sorted(self._fleet.conditions().items()):
            worker = self._fleet.worker(worker_id)
            info = worker.info if worker is not None else self._fleet.info(worker_id)
            info = info or self._fleet.history.lost_info(worker_id)
            if info is not None:
                found.append(_standing(info, worker, condition))
        return tuple(found)

    def _apart(self, now_us: int) -> tuple[ApartFacts, ...]:
        pairs, known = self._fleet.apart()[:MAX_APART], self._apart_since_us
        since = {each[:2]: known.get(each[:2], now_us) for each in pairs}
        self._apart_since_us = since
        return tuple(
            ApartFacts(
                prefill=each.source,
                decode=each.sink,
                reason=each.reason,
                since_us=since[each[:2]],
            )
            for each in pairs
        )

    def _store(self, now_us: int) -> StoreFacts | None:
        trouble = self._fleet.store_state().trouble
        if trouble is None:
            self._store_since_us = 0
            return None
        self._store_since_us = self._store_since_us or now_us
        return StoreFacts(trouble=trouble, since_us=self._store_since_us)


def _standing(info: WorkerInfo, worker: Worker | None, condition: Condition) -> WorkerStanding:
    stats = worker.stats if worker is not None else None
    return WorkerStanding(
        worker_id=info.worker_id,
        role=info.role,
        condition=condition.state.value,
        cause=None if condition.cause is None else condition.cause.value,
        reason=condition.reason or None,
        since_us=condition.since_us,
        is_replaced=condition.is_replaced,
        num_waiting=stats.num_waiting if stats else 0,
        num_running=stats.num_running if stats else 0,
        max_batch_size=info.max_batch_size or None,
        blocks_total=info.num_blocks,
        blocks_used=stats.blocks_used if stats else 0,
        prefill_unreachable=bool(stats and stats.prefill_unreachable),
    )
