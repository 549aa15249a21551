"""The load of the two pools: predicted times for requests that arrive now, and the reasons.

Reads the fleet's last reports and the prompts of the last minute; otherwise pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from statistics import median

from console.doctor.facts import TAKEN, lacks_places
from process.number_text import count, integer, percent
from protocol.messages import Role
from router.fleet.fleet import Fleet
from router.fleet.worker import Worker
from router.requests.trace_store import TraceStore
from router.routing.prediction import decode_step_ms, ttft_ms

MINUTE_US = 60_000_000
MAX_PROMPTS = 64
MAX_LOOKED_AT = 256
STEADY_SAMPLES = 5
_SHORTEST_QUEUES = 4


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """Current predictions; None where there is no data. `waits_ms` is how long requests have waited
    for their first token so far, `waits_for` the pool that they wait for. `blocks_wanted` and
    `places_wanted` are the needs of requests on decode workers, waiting ones included, as a share
    of the KV blocks and of the places in batches: over 1 if they do not fit."""

    predicted_ttft_ms: float | None
    predicted_step_ms: float | None
    blocks_wanted: float | None
    prefill_words: str
    decode_words: str
    places_wanted: float | None = None
    waits_ms: float | None = None
    waits_for: Role | None = None

    def prefill_pressure(self, ttft_target_ms: float) -> float | None:
        """The time to the first token as a share of its target: the predicted time, or the time
        that requests have waited so far, if that is longer."""
        times = [self.predicted_ttft_ms, self._waits_for(Role.PREFILL)]
        return max((each / ttft_target_ms for each in times if each is not None), default=None)

    def decode_pressure(self, ttft_target_ms: float, tpot_target_ms: float | None) -> float | None:
        """The largest of four shares of a limit: the predicted step, the blocks wanted, the places
        wanted, and the time that requests have waited for a place."""
        shares = [self.blocks_wanted, self.places_wanted]
        if self.predicted_step_ms is not None and tpot_target_ms is not None:
            shares.append(self.predicted_step_ms / tpot_target_ms)
        waits_ms = self._waits_for(Role.DECODE)
        if waits_ms is not None:
            shares.append(waits_ms / ttft_target_ms)
        return max((each for each in shares if each is not None), default=None)

    def _waits_for(self, role: Role) -> float | None:
        return self.waits_ms if self.waits_for is role else None


class SteadyLoad:
    """Medians of the last predictions, so that single outliers have no effect."""

    def __init__(self) -> None:
        self._ttft_ms: deque[float] = deque(maxlen=STEADY_SAMPLES)
        self._step_ms: deque[float] = deque(maxlen=STEADY_SAMPLES)

    def sample(self, load: FleetLoad) -> FleetLoad:
        """`load` with the medians as its predictions. Unknown predictions stay unknown."""
        return replace(
            load,
            predicted_ttft_ms=_steady(self._ttft_ms, load.predicted_ttft_ms),
            predicted_step_ms=_steady(self._step_ms, load.predicted_step_ms),
        )


def fleet_load(fleet: Fleet, traces: TraceStore) -> FleetLoad:
    """The current load. The first token's time is the 95th percentile over the prompts of the last
    minute, if each arrived now at the worker with the shortest queue."""
    decode, prefill = fleet.ready(Role.DECODE), fleet.ready(Role.PREFILL)
    queues = prefill or decode
    prompts = _recent_prompts(traces)
    has_load = bool(prompts) or traces.num_running > 0
    steps = [
        (decode_step_ms(each.speed), each.speed.num_decodes)
        for each in decode
        if each.speed is not None and each.speed.is_known and each.speed.num_decodes
    ]
    rows = sum(num for _, num in steps)
    queued = sum(each.queued_tokens for each in queues)
    pool = "prefill" if prefill else "decode"
    step_ms = sum(step * num for step, num in steps) / rows if rows else None
    waits_for = _waits_for(prefill, decode)
    return FleetLoad(
        predicted_ttft_ms=_p95([_best_ttft_ms(queues, *each) for each in prompts]),
        predicted_step_ms=step_ms,
        blocks_wanted=_blocks_wanted(decode) if has_load else None,
        prefill_words=f"{count(len(queues), f'{pool} worker')} "
        f"{'has' if len(queues) == 1 else 'have'} {count(queued, 'prompt token')} to compute",
        decode_words=_decode_words(decode, rows),
        places_wanted=_places_wanted(decode) if has_load else None,
        waits_ms=None if waits_for is None else _waits_ms(traces),
        waits_for=waits_for,
    )


def _decode_words(decode: Sequence[Worker], num_running: int) -> str:
    """The load of decode workers now."""
    reports = [each.stats for each in decode if each.stats is not None]
    total = sum(each.info.num_blocks for each in decode)
    used = sum(each.blocks_used for each in reports) / total if total else 0.0
    verb = "runs" if len(decode) == 1 else "run"
    return (
        f"{count(len(decode), 'decode worker')} {verb} {count(num_running, 'request')}, "
        f"{integer(sum(each.num_waiting for each in reports))} wait, and {percent(used)} of the "
        "pool's KV blocks are in use"
    )


def _places_wanted(decode: Sequence[Worker]) -> float | None:
    """Requests per place in the batches; None if a worker does not report its places. Waiting
    requests count where they wait for a place."""
    places = [each.info.max_batch_size for each in decode]
    if not places or not all(places):
        return None
    running = sum(each.stats.num_running for each in decode if each.stats is not None)
    waiting = sum(each.stats.num_waiting for each in decode if each.stats and _is_crowded(each))
    return (running + waiting) / sum(places)


def _blocks_wanted(decode: Sequence[Worker]) -> float | None:
    """Wanted blocks per block of the pool. Blocks in use are wanted. If most blocks of a worker are
    in use, each of its waiting requests wants as many as its running requests have on average."""
    total, wanted = sum(each.info.num_blocks for each in decode), 0.0
    for worker in decode:
        stats = worker.stats
        if stats is None:
            continue
        is_full = stats.blocks_used >= TAKEN * worker.info.num_blocks
        waiting = stats.num_waiting / max(1, stats.num_running) if is_full else 0.0
        wanted += stats.blocks_used * (1 + waiting)
    return wanted / total if total else None


def _waits_for(prefill: Sequence[Worker], decode: Sequence[Worker]) -> Role | None:
    """The pool that requests wait for: decode if most of its workers have full batches and a queue,
    prefill if prompts wait there, None if none wait."""
    crowded = sum(_is_crowded(each) for each in decode)
    if decode and 2 * crowded > len(decode):
        return Role.DECODE
    queues = prefill or decode
    waiting = sum(each.stats.num_waiting for each in queues if each.stats is not None)
    return Role.PREFILL if waiting else None


def _is_crowded(worker: Worker) -> bool:
    stats, places = worker.stats, worker.info.max_batch_size
    return stats is not None and lacks_places(stats.num_running, stats.num_waiting, places)


def _waits_ms(traces: TraceStore) -> float | None:
    """How long the requests without a first token have waited so far (95th percentile)."""
    now_us = traces.wall_us()
    waits = [
        (now_us - each.received_us) / 1000
        for each in traces.running()
        if not each.first_token_received_us
    ]
    return _p95(waits)


def tpot_target_ms(fleet: Fleet, configured: float | None) -> float | None:
    """The target in force: the configured one, otherwise the strictest of the decode workers."""
    if configured is not None:
        return configured
    known = [each.info.itl_target_ms for each in fleet.known(Role.DECODE)]
    return min((each for each in known if each > 0), default=None)


def _recent_prompts(traces: TraceStore) -> list[tuple[int, int]]:
    """Length and cached tokens of a sample of the prompts that arrived in the last minute."""
    since_us = traces.wall_us() - MINUTE_US
    found = []
    for trace in islice(traces.recent(), MAX_LOOKED_AT):
        if trace.received_us >= since_us and trace.attempts:
            placement = trace.attempts[0].placement
            chosen = placement.prefill or placement.decode
            missing = min(chosen.recompute_tokens, trace.num_prompt_tokens)
            found.append((trace.num_prompt_tokens, trace.num_prompt_tokens - missing))
    stride = -(-len(found) // MAX_PROMPTS) or 1
    return found[::stride]


def _best_ttft_ms(workers: Sequence[Worker], num_tokens: int, cached: int) -> float | None:
    shortest = sorted(workers, key=lambda each: each.queued_tokens)[:_SHORTEST_QUEUES]
    times = [
        ttft_ms(each.speed, each.queued_tokens, num_tokens, cached)
        for each in shortest
        if each.speed is not None and each.speed.is_known
    ]
    return min(times, default=None)


def _steady(samples: deque[float], newest: float | None) -> float | None:
    if newest is None:
        samples.clear()
        return None
    samples.append(newest)
    return median(samples)


def _p95(values: Sequence[float | None]) -> float | None:
    known = sorted(each for each in values if each is not None)
    return known[min(len(known) - 1, int(0.95 * len(known)))] if known else None
