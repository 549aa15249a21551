"""The fleet as operators see it: the object of `GET /fleet`.

Owns the shape of that object and its sums. An unknown value is null, never 0. Rates are per second,
times `_us` microseconds of the Unix epoch, durations `_ms`. `sample` runs once per second, whether
or not anyone reads, so that verdicts and history do not depend on readers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from console.doctor.client_goodput import clients_of, floods
from console.doctor.facts import Facts
from console.doctor.finding import Finding
from console.doctor.headline import Headline, Sides, Tone, headline
from console.doctor.observation import Observation
from console.doctor.observation import Targets as Goals
from console.telemetry.facts.fact_watch import FactWatch
from console.telemetry.facts.facts_json import facts_json
from console.telemetry.facts.loop_lag import LoopLag
from console.telemetry.fleet_load import FleetLoad, SteadyLoad, fleet_load, tpot_target_ms
from console.telemetry.kv_path_watch import PathWatch
from console.telemetry.kv_paths import UNKNOWN, expected_path, is_off_way, narrowed
from console.telemetry.other_routers import (
    SHARED_POINTS,
    PeerRouters,
    RouterSummary,
    SlotData,
    merged_pairs,
)
from console.telemetry.pressure import SideState, Verdict
from console.telemetry.request_window import POINT_US, RequestWindow, Slot
from console.telemetry.targets import Targets
from console.telemetry.worker_pairs import PairKey, PairPaths, PairTable
from console.telemetry.workers import workers_json
from http_kit.door import Door
from process.clock import clock_step_us
from process.number_text import ms
from process.store.ignored_entries import IgnoredEntries
from protocol.messages import Role
from protocol.traces import PrefillTrace
from router.fleet.fleet import Fleet
from router.requests.trace import AttemptTrace, Durations, RequestTrace
from router.requests.trace_store import TraceStore
from router.routing.placement import Mode

P50, P95 = 0.5, 0.95
_NO_PATHS = PairPaths(UNKNOWN, None)
NO_LOAD = FleetLoad(None, None, None, "", "")


@dataclass(frozen=True, slots=True)
class FleetGauges:
    """The fleet's current numbers; None for unknown ones."""

    prefill_pressure: float | None
    decode_pressure: float | None
    predicted_step_ms: float | None
    goodput: float | None
    ttft_target_ms: float
    tpot_target_ms: float | None
    goodput_target: float
    slow_pairs: int


class FleetReport:
    """Sums up one router's fleet; reads fleet and traces, owns neither. `targets` may change."""

    def __init__(
        self,
        fleet: Fleet,
        traces: TraceStore,
        targets: Targets,
        ignored: IgnoredEntries | None = None,
        door: Door | None = None,
    ) -> None:
        self.targets = targets
        self._fleet = fleet
        self._traces = traces
        self._window = RequestWindow(traces.wall_us)
        self.pairs = PairTable(traces.wall_us)
        self._paths = PathWatch()
        self._pair_paths: dict[PairKey, PairPaths] = {}
        self.peers = PeerRouters(ignored, traces.wall_us)
        self._watch = FactWatch(fleet, traces, door or Door(time.monotonic), self.peers.presence)
        self._verdict = Verdict()
        self.headline = Headline("No request in the last minute", None, Tone.IDLE)
        self._said_us = 0
        self._num_findings = 0
        self._load: FleetLoad | None = None
        self._steady = SteadyLoad()
        self._tpot_in_force: float | None = targets.tpot_target_ms
        traces.on_ended(self._take_ended)
        traces.on_moved(self._take_moved)

    def sample(self) -> None:
        """Measure pressure and collect facts. Call this once per second."""
        self._traces.report_ended()
        now_us = self._traces.wall_us()
        self._measure_paths(now_us)
        self._load = load = self._steady.sample(fleet_load(self._fleet, self._traces))
        ttft_target, tpot_target = self.targets.ttft_target_ms, self._tpot_target_ms
        self._tpot_in_force = tpot_target
        self._verdict.prefill.observe(load.prefill_pressure(ttft_target), now_us)
        self._verdict.decode.observe(load.decode_pressure(ttft_target, tpot_target), now_us)
        self._watch.sample(ttft_target)

    @property
    def facts(self) -> Facts:
        """The facts of the last sample."""
        return self._watch.latest

    @property
    def loop_lag(self) -> LoopLag:
        """Takes how late this router's event loop runs."""
        return self._watch.loop

    @property
    def short(self) -> tuple[Role, ...]:
        """The pools that are short by their pressure."""
        sides = ((Role.PREFILL, self._verdict.prefill), (Role.DECODE, self._verdict.decode))
        return tuple(role for role, side in sides if side.state is SideState.SHORT)

    def stamped(self, seen: Observation) -> Observation:
        """An observation with the current targets, pressures and facts."""
        default, load = Goals(), self._load or NO_LOAD
        ttft_target, tpot_target = self.targets.ttft_target_ms, self._tpot_target_ms
        return msgspec.structs.replace(
            seen,
            now_us=self._traces.wall_us(),
            targets=Goals(
                ttft_ms=ttft_target,
                tpot_ms=tpot_target or default.tpot_ms,
                goodput=self.targets.goodput_target,
            ),
            pressure_prefill=load.prefill_pressure(ttft_target),
            pressure_decode=load.decode_pressure(ttft_target, tpot_target),
            short=self.short,
            facts=self.facts,
        )

    def set_headline(self, findings: Sequence[Finding]) -> None:
        """Set the headline from the doctor's findings. It keeps its start time while its sentence
        stays the same."""
        load, sides = self._load or NO_LOAD, self._verdict
        states = (sides.prefill.state, sides.decode.state)
        words = Sides(
            sides.sentence, _cause(sides, load), SideState.SHORT in states,
            SideState.TIGHT in states, any(each is not None for each in states),
        )  # fmt: skip
        found = headline(findings, self.facts, self.targets.goodput_target, words)
        self._num_findings = len(findings)
        if found.text != self.headline.text:
            self._said_us = self._traces.wall_us()
        self.headline = found

    def gauges(self) -> FleetGauges:
        """The numbers that Prometheus reads."""
        self._traces.report_ended()
        load = self._load or NO_LOAD
        minute, _ = self._window.minute()
        return FleetGauges(
            prefill_pressure=load.prefill_pressure(self.targets.ttft_target_ms),
            decode_pressure=load.decode_pressure(self.targets.ttft_target_ms, self._tpot_target_ms),
            predicted_step_ms=load.predicted_step_ms,
            goodput=self._goodput_of_others(minute.goodput),
            ttft_target_ms=self.targets.ttft_target_ms,
            tpot_target_ms=self._tpot_target_ms,
            goodput_target=self.targets.goodput_target,
            slow_pairs=sum(map(is_off_way, self.pairs.as_json(self._paths_of))),
        )

    def _goodput_of_others(self, goodput: float | None) -> float | None:
        """The goodput without keys that flood, which cause their own late answers."""
        if any(map(floods, self.facts.keys)):
            return clients_of(self.facts).goodput
        return goodput

    def as_json(self) -> dict[str, Any]:
        """The body of `GET /fleet`."""
        self._traces.report_ended()
        return {
            "workers": workers_json(self._fleet),
            **facts_json(
                self.facts, self.peers.presence.serving(), self._fleet.store_state().notice
            ),
            "pairs": self.pairs_json(),
            "pressure": self._pressure_json(),
            "totals": self._totals_json(),
            "targets": {
                "ttft_target_ms": self.targets.ttft_target_ms,
                "tpot_target_ms": self._tpot_target_ms,
                "goodput_target": self.targets.goodput_target,
            },
            "clock": {"now_us": self._traces.wall_us(), "step_us": clock_step_us()},
            "history": _history_json(self._points()),
            "events": [
                {
                    "at_us": each.at_us,
                    "kind": each.kind.value,
                    "worker_id": each.worker_id or None,
                    "text": each.text,
                }
                for each in self._fleet.history.events()
            ],
        }

    def pairs_json(self) -> list[dict[str, Any]]:
        """The pairs of workers between which blocks moved, of all routers."""
        own = self.pairs.as_json(self._paths_of)
        return merged_pairs([own, *(each.pairs for each in self.peers.summaries.values())])

    @property
    def _tpot_target_ms(self) -> float | None:
        return tpot_target_ms(self._fleet, self.targets.tpot_target_ms)

    def _paths_of(self, key: PairKey) -> PairPaths:
        return self._pair_paths.get(key, _NO_PATHS)

    def _measure_paths(self, now_us: int) -> None:
        known = {each.worker_id: each.info for each in self._fleet.workers()}
        for worker in self._fleet.workers():
            if worker.stats is not None:
                self._paths.sample(worker.worker_id, worker.stats.links, now_us)
        self._paths.forget(set(known))
        self._pair_paths = {
            (a, b): PairPaths(
                self._paths.path(known[a], known[b], known),
                expected_path(known[a], known[b]),
                narrowed(known[a], known[b]),
            )
            for (a, b), _ in self.pairs.totals()
            if a in known and b in known
        }

    def summary(self, rows: list[dict[str, Any]], name: str = "") -> RouterSummary:
        """The summary for other routers; `rows` are this router's requests, `name` is its own."""
        self._traces.report_ended()
        minute, seconds = self._window.minute()
        return RouterSummary(
            minute=SlotData.of(minute),
            seconds=seconds,
            points=[SlotData.of(each) for each in self._window.points()[-SHARED_POINTS:]],
            num_inflight=self._traces.num_running,
            pairs=self.pairs.as_json(self._paths_of),
            rows=rows,
            name=name,
        )

    def _points(self) -> list[Slot]:
        """The history of all routers: our points, with the others' added."""
        others = self.peers.points()
        return [
            each.plus(others[each.start_us]) if each.start_us in others else each
            for each in self._window.points()
        ]

    # -- reports of ended requests ------------------------------------------------------------

    def _take_ended(self, traces: Sequence[RequestTrace], durations: Sequence[Durations]) -> None:
        is_good, tpot_target_ms = self.targets.is_good, self._tpot_in_force
        goods = [
            is_good(trace, phases, tpot_target_ms)
            for trace, phases in zip(traces, durations, strict=True)
        ]
        self._window.now().add(goods, durations, sum([each.num_output_tokens for each in traces]))
        by_key: Counter[tuple[str, bool]] = Counter()
        for trace, is_good_now in zip(traces, goods, strict=True):
            if is_good_now is not None:
                by_key[trace.key, is_good_now] += 1
            if len(trace.attempts) != 1 or trace.attempts[0].failed is not None:
                self._note_failures(trace)
        self._watch.keys.add(by_key)

    def _note_failures(self, trace: RequestTrace) -> None:
        for attempt in trace.attempts:
            placement = attempt.placement
            if attempt.failed is not None and placement.mode is Mode.REMOTE and placement.prefill:
                self.pairs.failed(placement.prefill.worker_id, placement.decode.worker_id)

    def _take_moved(self, attempt: AttemptTrace, trace: PrefillTrace) -> None:
        self._window.add_bytes(trace.bytes_moved)
        target = attempt.placement.decode.worker_id
        self.pairs.moved(target, trace)
        self._paths.add(trace.worker_id, target, trace.bytes_moved)
        path = self._paths_of((trace.worker_id, target)).measured
        attempt.path = "" if path == UNKNOWN else path

    # -- parts ------------------------------------------------------------------------------

    def _pressure_json(self) -> dict[str, Any]:
        load, verdict = self._load or NO_LOAD, self._verdict
        return {
            "prefill": load.prefill_pressure(self.targets.ttft_target_ms),
            "decode": load.decode_pressure(self.targets.ttft_target_ms, self._tpot_target_ms),
            "predicted_ttft_ms": load.predicted_ttft_ms,
            "predicted_step_ms": load.predicted_step_ms,
            "prefill_state": verdict.prefill.state and verdict.prefill.state.value,
            "decode_state": verdict.decode.state and verdict.decode.state.value,
            "verdict": self.headline.text,
            "cause": self.headline.cause,
            "tone": self.headline.tone.value,
            "rule": self.headline.rule,
            "findings": self._num_findings,
            "since_us": self._said_us or None,
        }

    def _totals_json(self) -> dict[str, Any]:
        others = list(self.peers.summaries.values())
        own, seconds = self._window.minute()
        minute = own
        for each in others:
            minute = minute.plus(each.minute.slot())

        def rate(name: str) -> float:
            own_rate: float = getattr(own, name) / seconds
            rates: list[float] = [getattr(e.minute, name) / e.seconds for e in others]
            return own_rate + sum(rates)

        return {
            "goodput": minute.goodput,
            "requests_per_s": rate("num_ended"),
            "good_requests_per_s": rate("num_good"),
            "ttft_p95_ms": minute.ttft.quantile(P95),
            "tpot_p95_ms": minute.tpot.quantile(P95),
            "num_inflight": self._traces.num_running + sum(e.num_inflight for e in others),
            "output_tokens_per_s": rate("output_tokens"),
            "bytes_moved_per_s": rate("bytes_moved"),
        }


def _cause(verdict: Verdict, load: FleetLoad) -> str | None:
    """One sentence about the sides under pressure."""
    words = []
    if verdict.prefill.state in (SideState.SHORT, SideState.TIGHT):
        words.append(
            "A prompt that arrives now gets its first token after "
            f"{ms(load.predicted_ttft_ms)} (p95); {load.prefill_words}."
            if load.predicted_ttft_ms is not None
            else f"{load.prefill_words}."
        )
    if verdict.decode.state in (SideState.SHORT, SideState.TIGHT):
        step = load.predicted_step_ms
        took = "" if step is None else f"A decode step takes {ms(step)}; "
        words.append(f"{took}{load.decode_words}.")
    return " ".join(words) or None


def _history_json(points: list[Slot]) -> dict[str, Any]:
    return {
        "start_us": points[0].start_us if points else None,
        "step_ms": POINT_US // 1000,
        "goodput": [each.goodput for each in points],
        "ttft_p50_ms": [each.ttft.quantile(P50) for each in points],
        "ttft_p95_ms": [each.ttft.quantile(P95) for each in points],
        "tpot_p50_ms": [each.tpot.quantile(P50) for each in points],
        "tpot_p95_ms": [each.tpot.quantile(P95) for each in points],
        "queue_p95_ms": [each.queue.quantile(P95) for each in points],
    }
