"""Refuses a request whose deadline, or own target of the first token, will have passed before its
turn comes.

Counts only prompts that are sure to come first: those of this router, on the same worker, older
than the request, of its share and of no lower priority. Other shares, other routers and the
request's own prompt would make it later still. So a request that is refused for its deadline would
have been late even if the prediction is too high by a factor of `MARGIN`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from protocol.errors import DeadlineUnreachable, TargetUnreachable
from router.requests.generation import Generation
from router.routing.prediction import least_wait_ms
from router.routing.view import Mode, Placement, WorkerLoad

MARGIN = 2
"""The predicted wait must exceed the time left by this factor."""
MAX_RETRY_S = 60


def check_deadline(
    generation: Generation,
    placement: Placement,
    loads: Iterable[WorkerLoad],
    running: Iterable[Generation],
) -> None:
    """Raises DeadlineUnreachable or TargetUnreachable if the prompts of `running` on the same
    worker take too long. `loads` are those from which the placement was made."""
    worker_id = _computing(placement)[0]
    for load in loads:
        if load.worker_id == worker_id:
            break
    else:
        return
    if load.speed is None:
        return
    left_ms = (generation.deadline - time.monotonic()) * 1000
    target_ms, most_ms = generation.request.ttft_target_ms, MARGIN * left_ms
    if target_ms is not None:
        most_ms = min(most_ms, target_ms)
    if least_wait_ms(load.speed, load.queued_tokens) <= most_ms:
        return
    ahead = sum(_waiting_tokens(each, worker_id) for each in running if _precedes(each, generation))
    wait_ms = least_wait_ms(load.speed, min(ahead, load.queued_tokens))
    told = f"the prompts that wait before this one take about {wait_ms / 1000:.1f} s, and its"
    if wait_ms > MARGIN * left_ms:
        retry_s = _retry_s(wait_ms - left_ms)
        raise DeadlineUnreachable(
            f"{told} deadline is in {max(0.0, left_ms) / 1000:.1f} s; try again in {retry_s} s",
            retry_s,
        )
    if target_ms is not None and wait_ms > target_ms:
        retry_s = _retry_s(wait_ms - target_ms)
        raise TargetUnreachable(
            f"{told} first token is to come within {target_ms / 1000:.1f} s; try again in "
            f"{retry_s} s",
            retry_s,
        )


def _retry_s(late_ms: float) -> int:
    return max(1, min(MAX_RETRY_S, math.ceil(late_ms / 1000)))


def _precedes(other: Generation, generation: Generation) -> bool:
    """Whether a worker serves the other prompt, which is older, first."""
    theirs, ours = other.request, generation.request
    return theirs.share == ours.share and theirs.priority >= ours.priority


def _waiting_tokens(generation: Generation, worker_id: str) -> int:
    """Prompt tokens that the worker still computes for a generation without a first token."""
    attempt = generation.attempt
    if attempt is None or generation.stream.token_ids:
        return 0
    name, num_tokens = _computing(attempt.placement)
    return num_tokens if name == worker_id else 0


def _computing(placement: Placement) -> tuple[str, int]:
    """The worker that computes the prompt, and the number of tokens that it computes."""
    chosen = placement.decode
    if placement.mode is not Mode.LOCAL:
        if placement.prefill is None:
            return "", 0
        chosen = placement.prefill
    return chosen.worker_id, chosen.recompute_tokens
