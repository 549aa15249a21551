"""Which requests are refused because they are predicted to miss their own targets.

Pure. Under overload, a queue that admits all requests makes all of them late. So a request is
refused if its wait leaves too little of its target, or if the requests that decode already would
slow its tokens down too much. The wait counts the prompts that a worker serves first, by the rule
of `scheduling.turns`: those of the same share and of no lower priority, and of each other share as
much as costs it the same as this share's own. A token of background work costs its share more. So
the least urgent requests are refused first, and a share that floods the fleet refuses mostly its
own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from router.routing.placement import Candidate, Placement, Targets, WorkerLoad
from scheduling.turns import token_cost

MARGIN = 0.2
"""Predictions must meet a target with this part of it to spare. They leave out later requests, and
what other routers have just sent. Workers stay as busy with a shorter queue, so a wide margin
costs hardly any throughput under overload."""
MARGIN_STEP = 0.05
"""Each step of priority above 0 narrows the margin by this, and each one below 0 widens it, within
`LEAST_MARGIN` and `MOST_MARGIN`."""
LEAST_MARGIN, MOST_MARGIN = 0.05, 0.5
OTHERS_MARGIN = 0.2
"""The margin is wider by this times the part of the fleet's requests that other routers send
without telling this one."""
LEAST_WAIT = 0.1
"""A request that would be late even without a queue may wait for this part of its target."""
TRUST = 0.1
"""Requests are refused only by step models that are trusted at least this far. A higher bound would
take too many seconds of overload to reach where steps are long."""


class WaitingPrompt(NamedTuple):
    """A prompt without a first token, on the worker that computes `num_tokens` of it."""

    worker_id: str
    num_tokens: int
    share: str
    priority: int


class Asker(NamedTuple):
    """The request's share and priority, and its targets. `left` is the part of its time
    that more urgent requests to come leave it, see `UrgentWork.left_for`. `others_share`: the part
    of the fleet's requests that other routers send without telling this one."""

    targets: Targets
    share: str = ""
    priority: int = 0
    left: float = 1.0
    others_share: float = 0.0

    @property
    def spared(self) -> float:
        """The part of a target that predictions may use up."""
        margin = MARGIN - MARGIN_STEP * self.priority + OTHERS_MARGIN * self.others_share
        return 1.0 - min(MOST_MARGIN, max(LEAST_MARGIN, margin))


class Shed(NamedTuple):
    """Why a request is refused: what is predicted, what is asked for, and for how long it would
    have to stay away."""

    predicted_ms: float
    target_ms: float
    late_ms: float
    is_first_token: bool


def shed(
    asker: Asker,
    placement: Placement,
    loads: Iterable[WorkerLoad],
    waiting: Iterable[WaitingPrompt],
) -> Shed | None:
    """Why a request with this placement is refused; None if it is not. `loads` are those from which
    the placement was made, `waiting` the prompts that this router has sent and that wait for their
    first tokens."""
    chosen = placement.prefill or placement.decode
    by_name = {each.worker_id: each for each in loads}
    computing, decode = by_name[chosen.worker_id], by_name[placement.decode.worker_id]
    if asker.targets.ttft_ms is not None and _is_trusted(computing):
        target_ms = asker.targets.ttft_ms
        own_ms = (chosen.ttft_ms or 0.0) - chosen.wait_ms
        most_ms = max(LEAST_WAIT * target_ms, asker.left * asker.spared * target_ms - own_ms)
        if chosen.wait_ms > most_ms:
            wait_ms = wait_of(asker, chosen, computing, waiting)
            if wait_ms > most_ms:
                predicted_ms = (wait_ms + own_ms) / asker.left
                return Shed(predicted_ms, target_ms, wait_ms - most_ms, True)
    if asker.targets.tpot_ms is not None and _is_trusted(decode):
        return _too_slow(asker, placement.decode, decode, asker.targets.tpot_ms)
    return None


def wait_of(
    asker: Asker, chosen: Candidate, load: WorkerLoad, waiting: Iterable[WaitingPrompt]
) -> float:
    """The time of the prompts that this worker serves first. Prompts of other routers are assumed
    to be like this router's."""
    before = paid = known = 0
    others, costs = Counter[str](), Counter[str]()
    for each in waiting:
        if each.worker_id != load.worker_id:
            continue
        known += each.num_tokens
        cost = each.num_tokens * token_cost(each.priority)
        if each.share != asker.share:
            others[each.share] += each.num_tokens
            costs[each.share] += cost
        elif each.priority >= asker.priority:
            before += each.num_tokens
            paid += cost
    if not known or not load.queued_tokens:
        return chosen.wait_ms
    scale = load.queued_tokens / known
    paid_by_then = paid * scale + chosen.recompute_tokens * token_cost(asker.priority)
    ahead = before * scale
    for name, num_tokens in others.items():
        ahead += num_tokens * min(scale, paid_by_then / max(1, costs[name]))
    return chosen.wait_ms * min(1.0, ahead / load.queued_tokens)


def _too_slow(asker: Asker, chosen: Candidate, load: WorkerLoad, target_ms: float) -> Shed | None:
    """Why the other requests on a decode worker make the tokens of this one too slow. Prompts that
    wait there refuse nobody by that: they may be of another share, and are over soon."""
    most_ms, step_ms = asker.spared * target_ms, load.pace.step_ms
    if step_ms <= most_ms or load.pace.idle_ms >= most_ms:
        return None
    late_ms = chosen.decode_ms / max(1, load.num_requests)  # until one of them is over
    return Shed(step_ms, target_ms, late_ms, False)


def _is_trusted(load: WorkerLoad) -> bool:
    speed = load.speed
    return speed is not None and min(speed.step_trust, speed.token_trust) >= TRUST
