"""Figures that several rules use, computed from an observation. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

from console.doctor.client_goodput import clients_of
from console.doctor.finding import Urgency
from console.doctor.observation import Observation, RequestFacts, WorkerFacts
from protocol.messages import Role

SERVING = ("ready", "stalled")
MIN_STEPS = 50
"""The fewest steps in the window for which their mean is used."""


def percentile(values: Iterable[float], share: float) -> float | None:
    """The smallest value that at least `share` of all values do not exceed (nearest rank); None
    without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def ttft_p95_ms(seen: Observation) -> float | None:
    """Time to first token that 95 % of requests do not exceed."""
    return percentile((each.ttft_ms for each in seen.requests if each.ttft_ms is not None), 0.95)


def tpot_p95_ms(seen: Observation) -> float | None:
    """Time per output token that 95 % of requests do not exceed."""
    return percentile((each.tpot_ms for each in seen.requests if each.tpot_ms is not None), 0.95)


def is_ttft_high(seen: Observation) -> bool:
    """Whether the first tokens miss their target."""
    p95 = ttft_p95_ms(seen)
    return p95 is not None and p95 > seen.targets.ttft_ms


def is_tpot_high(seen: Observation) -> bool:
    """Whether the later tokens miss their target."""
    p95 = tpot_p95_ms(seen)
    return p95 is not None and p95 > seen.targets.tpot_ms


def late_requests(seen: Observation) -> list[RequestFacts]:
    """Requests whose first token missed its target."""
    limit = seen.targets.ttft_ms
    return [each for each in seen.requests if each.ttft_ms is not None and each.ttft_ms > limit]


def first_token_share(requests: Sequence[RequestFacts], *stages: str) -> float:
    """The share of these requests' summed time to first token that the stages took."""
    whole = sum(each.ttft_ms or 0.0 for each in requests)
    part = sum(each.first.get(stage, 0.0) for each in requests for stage in stages)
    return part / whole if whole else 0.0


def goodput(seen: Observation) -> float | None:
    """Share of requests that met both targets and did not fail; None without requests."""
    if not seen.requests:
        return None
    return sum(_is_good(each, seen) for each in seen.requests) / len(seen.requests)


def _is_good(request: RequestFacts, seen: Observation) -> bool:
    ttft, tpot = request.ttft_ms, request.tpot_ms
    meets_tpot = tpot is None or tpot <= seen.targets.tpot_ms
    return ttft is not None and ttft <= seen.targets.ttft_ms and meets_tpot and not failed(request)


def failed(request: RequestFacts) -> bool:
    """Whether Baton failed the request; a client that left does not count as a failure."""
    return request.outcome == "failed"


def urgency(seen: Observation) -> Urgency:
    """URGENT if clients notice."""
    share = goodput(seen)
    is_missed = share is not None and share < seen.targets.goodput
    is_missed = is_missed or clients_of(seen.facts).suffer(seen.targets.goodput)
    return Urgency.URGENT if is_missed else Urgency.SOON


def serving(seen: Observation, role: Role) -> list[WorkerFacts]:
    """The workers of a pool that accept requests."""
    return [each for each in seen.workers if each.role is role and each.state in SERVING]


ALIKE = 2.0
"""The batches and contexts of workers that are compared differ at most by this factor. A slow
worker's sequences stay longer, so its batches are larger."""
_LITTLE_CONTEXT = 4096
"""Contexts shorter than this hardly make a step longer."""


def slowness(worker: WorkerFacts, pool: Sequence[WorkerFacts]) -> float | None:
    """The ratio of a worker's step time to the median time that the others of its pool would need
    for the same work; None if unknown.

    Each of the others' measured steps is scaled by its own step model from its work to the
    worker's. The scale lies between the ratios of their tokens and of their contexts, whatever the
    error of the model's coefficients.
    """
    if worker.step_ms is None or worker.num_steps < MIN_STEPS:
        return None
    others = (_steps_for(worker, each) for each in pool if each is not worker)
    expected = median_or_none(others)
    return worker.step_ms / expected if expected else None


def _steps_for(worker: WorkerFacts, other: WorkerFacts) -> float | None:
    """The time that the other worker's steps would take with this one's work."""
    if other.step_ms is None or other.num_steps < MIN_STEPS or not _are_alike(worker, other):
        return None
    own, wanted = _predicted_ms(other, other), _predicted_ms(other, worker)
    return other.step_ms * wanted / own if own and wanted else other.step_ms


def _are_alike(worker: WorkerFacts, other: WorkerFacts) -> bool:
    """Whether the steps of two workers hold about the same work. If one worker carries most of a
    pool's load, neither worker's step model applies to the other worker's steps."""
    pairs = (
        (worker.step_tokens, other.step_tokens, 1),
        (worker.step_attended, other.step_attended, _LITTLE_CONTEXT),
    )
    return all(
        one is None or another is None or max(one, another) <= ALIKE * max(least, min(one, another))
        for one, another, least in pairs
    )


def _predicted_ms(by: WorkerFacts, of: WorkerFacts) -> float | None:
    """The prediction of one worker's model for the steps of another."""
    if by.step_model is None or of.step_tokens is None or of.step_attended is None:
        return None
    return by.step_model.predict_ms(of.step_tokens, of.step_attended)


AVOIDED = 10
"""Routers avoid a worker whose pool's others had this many times its steps lately."""


def avoided_slowness(worker: WorkerFacts, pool: Sequence[WorkerFacts]) -> float | None:
    """Like `slowness`, for a worker that routers have avoided since it ran a few slow steps. The
    ratio compares what the worker's step model predicts for the work of the pool's other workers
    with the time that they took. None if the worker is not avoided, or nothing is known."""
    others = [each for each in pool if each is not worker and each.num_steps >= MIN_STEPS]
    steps = median_or_none(each.late_steps for each in others)
    if steps is None or steps < max(MIN_STEPS, AVOIDED * worker.late_steps):
        return None
    return median_or_none(_late_ratio(worker, each) for each in others)


def _late_ratio(worker: WorkerFacts, other: WorkerFacts) -> float | None:
    model, tokens, attended = worker.late_model, other.step_tokens, other.step_attended
    if model is None or not other.step_ms or tokens is None or attended is None:
        return None
    return model.predict_ms(tokens, attended) / other.step_ms


def median_or_none(values: Iterable[float | None]) -> float | None:
    """The median of the known values."""
    known = [each for each in values if each is not None]
    return median(known) if known else None
