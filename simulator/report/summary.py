"""The numbers of a report: latencies, goodput, load of the pools, hits, transfers, cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from simulator.fleet import Outcome
from simulator.requests import Request
from simulator.usage import GAP_BUCKETS, Usage
from simulator.worker import SimulatedWorker


@dataclass(frozen=True)
class Targets:
    """The targets that a request must meet to count as good."""

    ttft_ms: float
    tpot_ms: float

    def missed(self, request: Request) -> str:
        """The setting of the target that a served request missed; "" if it met both."""
        if self.are_met(request):
            return ""
        return "--ttft-ms" if request.ttft_s * 1000 > self.ttft_ms else "--tpot-ms"

    def are_met(self, request: Request) -> bool:
        """Whether a served request met both."""
        in_time = request.ttft_s * 1000 <= self.ttft_ms
        return in_time and request.tpot_s * 1000 <= self.tpot_ms


@dataclass(frozen=True)
class Spread:
    """The mean and percentiles of a quantity."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None without values."""
        if not values:
            return None
        ordered = sorted(values)
        parts = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
        return cls(math.fsum(ordered) / len(ordered), *parts)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True)
class Pool:
    """The workers of one role; shares are those of the time from the first arrival to the last
    token. `mean_batch` is the mean number of sequences that a step decodes."""

    role: str
    num_workers: int
    num_cards: int
    busy_share: float
    busiest_share: float
    prefill_share: float
    mean_batch: float
    preemptions: int


@dataclass(frozen=True)
class Summary:
    """One simulated fleet under one trace. `itl_ms` is the time between tokens, by the steps that
    made them. `tpot_ms` is the mean time of a token for each request, including waiting. `refused`
    has the number of requests by reason; `rules` by the rule that placed them."""

    fleet: str
    num_requests: int
    num_served: int
    refused: dict[str, int]
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    total_ms: Spread | None
    goodput_share: float
    goodput_per_s: float
    hit_share: float
    split_share: float
    sent_gb: float
    exposed_ms: Spread | None
    rules: dict[str, int]
    pools: list[Pool]
    gpu_hours: float
    gpu_s_per_request: float
    usd: float | None
    usd_per_million_output_tokens: float | None

    def as_json(self) -> dict[str, Any]:
        """Everything, by name."""
        return asdict(self)


def summarize(
    fleet: str, outcome: Outcome, targets: Targets, usd_per_gpu_hour: float | None = None
) -> Summary:
    """Sum up a simulation. Requests that were refused count as not good."""
    requests = outcome.requests
    served = [each for each in requests if not each.failure]
    begin = min((each.arrival for each in requests), default=0.0)
    duration = max((each.end for each in served), default=begin) - begin
    rate = 1 / duration if duration > 0 else 0.0
    num_good = sum(targets.are_met(each) for each in served)
    output = sum(each.num_output for each in served)
    prompt = sum(each.num_prompt for each in served)
    split = [each for each in served if each.prefill is not None]
    cards = sum(each.spec.num_cards for each in outcome.workers)
    usd = None if usd_per_gpu_hour is None else cards * duration / 3600 * usd_per_gpu_hour
    return Summary(
        fleet=fleet,
        num_requests=len(requests),
        num_served=len(served),
        refused=dict(sorted(Counter(e.failure for e in requests if e.failure).items())),
        duration_s=duration,
        requests_per_s=len(served) * rate,
        output_tokens_per_s=output * rate,
        ttft_ms=Spread.of([each.ttft_s * 1000 for each in served]),
        tpot_ms=Spread.of([each.tpot_s * 1000 for each in served if each.num_output > 1]),
        itl_ms=_gaps_ms([each.usage for each in outcome.workers]),
        total_ms=Spread.of([(each.end - each.arrival) * 1000 for each in served]),
        goodput_share=num_good / len(requests) if requests else 0.0,
        goodput_per_s=num_good * rate,
        hit_share=sum(each.cached_tokens for each in served) / prompt if prompt else 0.0,
        split_share=len(split) / len(served) if served else 0.0,
        sent_gb=sum(each.sent_bytes for each in split) / 1e9,
        exposed_ms=Spread.of([each.exposed_s * 1000 for each in split]),
        rules=dict(sorted(Counter(each.rule for each in served).items())),
        pools=_pools(outcome.workers, duration),
        gpu_hours=cards * duration / 3600,
        gpu_s_per_request=cards * duration / len(served) if served else 0.0,
        usd=usd,
        usd_per_million_output_tokens=usd / output * 1e6 if usd is not None and output else None,
    )


def _gaps_ms(usages: Sequence[Usage]) -> Spread | None:
    """The time between tokens, by the steps that made them, with an error of at most 2 %."""
    counts: Counter[int] = Counter()
    for usage in usages:
        counts.update(usage.gaps)
    total = sum(counts.values())
    if not total:
        return None
    values = {bucket: 1000 * math.exp(bucket / GAP_BUCKETS) for bucket in sorted(counts)}

    def at(share: float) -> float:
        seen = 0
        for bucket, value in values.items():
            seen += counts[bucket]
            if seen >= share * total:
                return value
        return value

    mean = math.fsum(counts[bucket] * value for bucket, value in values.items()) / total
    return Spread(mean, at(0.5), at(0.9), at(0.99))


def _pools(workers: Sequence[SimulatedWorker], duration: float) -> list[Pool]:
    roles: dict[str, list[SimulatedWorker]] = {}
    for each in workers:
        roles.setdefault(each.spec.role.value, []).append(each)
    return [_pool(role, members, max(duration, 1e-9)) for role, members in roles.items()]


def _pool(role: str, workers: Sequence[SimulatedWorker], duration: float) -> Pool:
    usages = [each.usage for each in workers]
    busy = [(each.prefill_s + each.decode_s) / duration for each in usages]
    steps = sum(each.num_steps for each in usages)
    return Pool(
        role=role,
        num_workers=len(workers),
        num_cards=sum(each.spec.num_cards for each in workers),
        busy_share=sum(busy) / len(busy),
        busiest_share=max(busy),
        prefill_share=sum(each.prefill_s for each in usages) / duration / len(usages),
        mean_batch=sum(each.decode_tokens for each in usages) / steps if steps else 0.0,
        preemptions=sum(each.num_preemptions for each in usages),
    )
