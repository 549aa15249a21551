"""The doctor's input: a fleet's last ten minutes, from traces and load reports.

Owns a sample of the requests that ended, at most `MAX_PER_S` of each second, drawn evenly. Stages
are computed once per request, in a thread, because an output may have thousands of steps. Reads
fleet, traces and the fleet's report.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from typing import Any

from console.doctor.observation import (
    WINDOW_S,
    MissPoint,
    Observation,
    PairFacts,
    RequestFacts,
    WorkerFacts,
)
from console.telemetry.caches.cache_report import CacheReport, known_workers
from console.telemetry.examination.request_facts import request_facts
from console.telemetry.examination.worker_window import WorkerWindow
from console.telemetry.fleet_report import FleetReport
from protocol.messages import Role
from router.fleet.fleet import Fleet
from router.fleet.history import EventKind
from router.fleet.worker import Worker
from router.requests.trace import Durations, RequestTrace
from router.requests.trace_store import TraceStore

MAX_PER_S = 4
_PAIR_WINDOW_S = 60


class FleetObserver:
    """Observes one router's fleet."""

    def __init__(
        self,
        fleet: Fleet,
        traces: TraceStore,
        report: FleetReport,
        cache: CacheReport,
        rng: random.Random,
    ) -> None:
        self._fleet, self._traces, self._report = fleet, traces, report
        self._cache = cache
        self._rng = rng
        self._ended: list[RequestTrace] = []
        self._requests: deque[RequestFacts] = deque(maxlen=MAX_PER_S * WINDOW_S)
        self._workers = WorkerWindow()
        traces.on_ended(self._take_ended)

    async def sample(self) -> None:
        """Take samples of workers, and the facts of requests that ended; once per second."""
        self._traces.report_ended()
        now_us, ended, self._ended = self._traces.wall_us(), self._ended, []
        if len(ended) > MAX_PER_S:
            ended = self._rng.sample(ended, MAX_PER_S)
        if ended:
            self._requests.extend(await asyncio.to_thread(_facts, ended, now_us))
        while self._requests and self._requests[0].received_us < now_us - 2 * WINDOW_S * 1e6:
            self._requests.popleft()
        self._workers.sample(self._known(), now_us)

    def observe(self) -> Observation:
        """The fleet's last `WINDOW_S` seconds."""
        now_us = self._traces.wall_us()
        since_us = now_us - WINDOW_S * 1e6
        requests = tuple(each for each in self._requests if each.received_us >= since_us)
        pairs, curve = self._report.pairs_json(), self._cache.curve_json()
        lost = [
            each.worker_id
            for each in self._fleet.history.events()
            if each.kind is EventKind.LOST and each.at_us >= since_us
        ]
        lengths = [each.num_prompt_tokens for each in requests]
        mean_prompt = sum(lengths) / len(lengths) if lengths else 0.0
        seen = Observation(
            now_us=now_us,
            workers=tuple(
                self._workers.facts(
                    each, _hits(each.worker_id, requests), lost.count(each.worker_id), mean_prompt
                )
                for each in self._known()
            )
            + self._away(lost),
            pairs=tuple(map(_pair, pairs)),
            requests=requests,
            cache_blocks=curve["blocks_now"] or None,
            miss_curve=tuple(
                MissPoint(blocks=each["blocks"], miss_ratio=each["miss_ratio"])
                for each in curve["points"]
            ),
            settings=_chosen(self._known()),
        )
        return self._report.stamped(seen)

    def _known(self) -> list[Worker]:
        return known_workers(self._fleet)

    def _away(self, lost: list[str]) -> tuple[WorkerFacts, ...]:
        """Workers that were lost and are not back or not ready yet. `lost` has an id for each
        loss."""
        known = {each.worker_id for each in self._known()}
        lost_infos = {each.info.worker_id: each.info for each in self._fleet.history.lost()}
        found = []
        for worker_id in dict.fromkeys(lost):
            info = lost_infos.get(worker_id) or self._fleet.info(worker_id)
            if worker_id in known or info is None:
                continue
            state = "lost" if worker_id in lost_infos else info.state.value
            losses = lost.count(worker_id)
            found.append(
                WorkerFacts(worker_id=worker_id, role=info.role, state=state, losses=losses)
            )
        return tuple(found)

    def _take_ended(self, traces: Sequence[RequestTrace], _: Sequence[Durations]) -> None:
        self._ended.extend(traces)


def _chosen(workers: Sequence[Worker]) -> dict[str, str]:
    """The settings that decode workers have registered, and those of prefill workers that findings
    need. Values that differ within a pool are left out."""
    decode = [each.info for each in workers if each.role is Role.DECODE]
    found = {
        name: value
        for name, value in (decode[0].chosen if decode else {}).items()
        if all(each.chosen.get(name) == value for each in decode)
    }
    targets = {f"{each.itl_target_ms:g}" for each in decode if each.itl_target_ms}
    if len(targets) == 1:
        found["itl_target_ms"] = targets.pop()
    sizes = {each.info.max_batch_size for each in workers if each.role is Role.PREFILL}
    if len(sizes) == 1:
        found["prefill.max_batch_size"] = str(sizes.pop())
    return found


def _facts(traces: Sequence[RequestTrace], now_us: int) -> list[RequestFacts]:
    return [request_facts(each, now_us) for each in traces]


def _hits(worker_id: str, requests: tuple[RequestFacts, ...]) -> tuple[int, int]:
    """Prompt tokens that came from a worker's cache, and all its prompt tokens."""
    cached = total = 0
    for each in requests:
        if each.prefill == worker_id:
            cached, total = cached + each.cached_tokens, total + each.num_prompt_tokens
        elif each.decode == worker_id:
            own = each.cached_tokens if each.prefill is None else each.decode_cached_tokens
            cached, total = cached + own, total + each.num_prompt_tokens
    return cached, total


def _pair(shown: dict[str, Any]) -> PairFacts:
    return PairFacts(
        prefill=shown["prefill"],
        decode=shown["decode"],
        path=shown["path"],
        expected_path=shown["expected_path"],
        bytes_moved=round((shown["bytes_per_s"] or 0.0) * _PAIR_WINDOW_S),
        busy_bytes_per_s=shown["busy_bytes_per_s"],
        is_below_way=shown.get("is_below_way", False),
        narrowed=tuple(shown.get("narrowed", ())),
        exposed_p95_ms=shown["exposed_p95_ms"],
    )
