"""Refuses a request that would be late: for its deadline, or for its own targets.

A request is refused for its deadline only if it is certain to be late. Only prompts that surely
come first count: prompts of this router, on the same worker, older than the request, of its share
and of no lower priority. Other shares, other routers and the request's own prompt would make it
later still. So a request that is refused for its deadline would have been late even if the
prediction is too high by a factor of `MARGIN`. For targets, predictions decide: see
`router.routing.shedding`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from protocol.errors import DeadlineUnreachable, TargetUnreachable, retry_after
from router.requests.machine.generation import Generation
from router.routing.placement import Mode, Placement, Targets, WorkerLoad
from router.routing.prediction import least_wait_ms
from router.routing.shedding import Asker, WaitingPrompt, shed
from router.routing.urgent_work import UrgentWork

MARGIN = 2
"""The predicted wait must exceed the time left by this factor."""


def check_deadline(
    generation: Generation,
    placement: Placement,
    loads: Iterable[WorkerLoad],
    running: Iterable[Generation],
    now: float,
) -> None:
    """Raises DeadlineUnreachable if the prompts of `running` on the same worker take too long.
    `loads` are those from which the placement was made."""
    worker_id = _computing(placement)[0]
    for load in loads:
        if load.worker_id == worker_id:
            break
    else:
        return
    if load.speed is None:
        return
    left_ms = (generation.deadline - now) * 1000
    if least_wait_ms(load.speed, load.queued_tokens) <= MARGIN * left_ms:
        return
    ahead = sum(_waiting_tokens(each, worker_id) for each in running if _precedes(each, generation))
    wait_ms = least_wait_ms(load.speed, min(ahead, load.queued_tokens))
    if wait_ms > MARGIN * left_ms:
        retry_s = retry_after((wait_ms - left_ms) / 1000)
        raise DeadlineUnreachable(
            f"the prompts that wait before this one take about {wait_ms / 1000:.1f} s, and its "
            f"deadline is in {max(0.0, left_ms) / 1000:.1f} s; try again in {retry_s} s",
            retry_s,
        )


def check_targets(
    generation: Generation,
    placement: Placement,
    loads: Iterable[WorkerLoad],
    running: Iterable[Generation],
    urgent: UrgentWork,
    others_share: float,
) -> None:
    """Raises TargetUnreachable if the request is predicted to miss its own targets because of the
    load. Other routers send `others_share` of the fleet's requests untold."""
    request = generation.request
    ttft_ms, tpot_ms = request.ttft_target_ms, request.tpot_target_ms
    if ttft_ms is None and tpot_ms is None:
        return
    left = urgent.left_for(request.share, request.priority)
    targets = Targets(ttft_ms, tpot_ms)
    asker = Asker(targets, request.share, request.priority, left, others_share)
    found = shed(asker, placement, loads, _prompts(running))
    if found is None:
        return
    retry_s, target_s = retry_after(found.late_ms / 1000), found.target_ms / 1000
    if found.is_first_token:
        reason = f"its first token would come after about {found.predicted_ms / 1000:.1f} s"
        raise TargetUnreachable(
            f"{reason}, later than its target of {target_s:.1f} s; try again in {retry_s} s",
            retry_s,
        )
    raise TargetUnreachable(
        f"its tokens would take about {found.predicted_ms:.0f} ms each beside others, more than "
        f"their target of {found.target_ms:.0f} ms; try again in {retry_s} s",
        retry_s,
    )


def _prompts(running: Iterable[Generation]) -> Iterator[WaitingPrompt]:
    """The prompts that wait for their first tokens."""
    for each in running:
        attempt = each.attempt
        if attempt is not None and not each.stream.token_ids:
            name, num_tokens = _computing(attempt.placement)
            yield WaitingPrompt(name, num_tokens, each.request.share, each.request.priority)


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
