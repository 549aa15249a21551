"""How quickly a worker with its present load computes prompts and decodes; input of placements.

Pure. The step model that a worker reports begins as a guess, and a few unlucky steps may mislead
it. So its weight is the accuracy that it has shown lately, and the speed of a typical worker has
the rest of the weight. A worker that has just started neither draws nor repels requests, and one
that was slow once is tried again.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp2, inf
from statistics import median

import msgspec

from router.routing.prediction import US_PER_MS, WorkerSpeed

STEPS, TOKENS = 50, 512
"""Steps, and prompt tokens, after which an accurate step model is half believed."""
HALF_LIFE_US = 10_000_000
"""A step model is believed half as much after this time without a step."""
TYPICAL_TRUST = 0.3
"""Workers whose models are trusted less than this are not used to judge others."""
GUESS = WorkerSpeed(1000.0, 200.0, 0.01, 512, 50.0, 0, 0)
"""The assumed speed of a worker while nothing is known of any."""


class Pace(msgspec.Struct, frozen=True, gc=False):
    """A worker's speed under its load.

    - `between_us`: the time of a step with prompt tokens that is not spent on them, decodes
      included; `room_us`: the most time for prompts in such a step.
    - `wait_ms`: until the prompts that wait there now are computed.
    - `step_ms`: a decode step of all requests that wait or run there; `idle_ms`: of one alone.
    - `fixed_us`, `row_us`: the parts of a decode step, one for each step and one for each request.
    """

    per_token_us: float
    per_attended_us: float
    chunk_tokens: int
    between_us: float
    room_us: float
    wait_ms: float
    step_ms: float
    idle_ms: float
    itl_target_ms: float
    fixed_us: float = 0.0
    row_us: float = 0.0

    def prompt_ms(self, num_tokens: int, attended: int) -> tuple[float, float]:
        """The time from a prompt's first chunk to its last one, and the part of it that is work on
        the prompt."""
        work_us = self.per_token_us * num_tokens + self.per_attended_us * attended
        num_steps = -(-num_tokens // self.chunk_tokens)
        if work_us > self.room_us * num_steps:
            num_steps = -int(-work_us // self.room_us)
        return (work_us + num_steps * self.between_us) / US_PER_MS, work_us / US_PER_MS

    def step_with_prompts_ms(self, queued_tokens: int) -> float:
        """The time of a step that computes as much as it may of prompts with `queued_tokens`."""
        tokens = min(queued_tokens, self.chunk_tokens)
        return (self.between_us + min(self.room_us, self.per_token_us * tokens)) / US_PER_MS


def pace_of(
    reported: WorkerSpeed | None,
    typical: WorkerSpeed | None,
    queued_tokens: int,
    num_waiting: int,
    num_decoding: int,
) -> Pace:
    """The pace of a worker where `num_waiting` prompts have `queued_tokens` to compute, and
    `num_decoding` requests decode or will."""
    return under_load(unloaded_pace(reported, typical), queued_tokens, num_waiting, num_decoding)


def unloaded_pace(reported: WorkerSpeed | None, typical: WorkerSpeed | None) -> Pace:
    """The pace of a worker where nothing waits, besides what decoded at its last report. Its speed
    is between the reported one and that of a typical worker."""
    if reported is None or typical is None:
        speed = typical or GUESS
        fixed_us, token_us, attended_us = speed.fixed_us, speed.per_token_us, speed.per_attended_us
    else:
        speed, tokens = reported, reported.token_trust * reported.freshness
        fixed_us = _mix(typical.fixed_us, speed.fixed_us, speed.step_trust * speed.freshness)
        token_us = _mix(typical.per_token_us, speed.per_token_us, tokens)
        attended_us = _mix(typical.per_attended_us, speed.per_attended_us, tokens)
    row_us = token_us + attended_us * (speed.context_tokens / max(1, speed.num_decodes))
    between_us, room_us = fixed_us, inf
    if speed.num_decodes:
        between_us += row_us * speed.num_decodes
        room_us = max(speed.itl_target_ms * US_PER_MS - between_us, between_us / 4, 1.0)
    return Pace(
        per_token_us=token_us,
        per_attended_us=attended_us,
        chunk_tokens=max(1, speed.chunk_max_tokens),
        between_us=between_us,
        room_us=room_us,
        wait_ms=0.0,
        step_ms=fixed_us / US_PER_MS,
        idle_ms=(fixed_us + token_us) / US_PER_MS,
        itl_target_ms=speed.itl_target_ms,
        fixed_us=fixed_us,
        row_us=row_us,
    )


def under_load(pace: Pace, queued_tokens: int, num_waiting: int, num_decoding: int) -> Pace:
    """An unloaded pace under a load as in `pace_of`."""
    wait_ms = 0.0
    if queued_tokens:
        attended = queued_tokens * (queued_tokens // max(1, num_waiting)) // 2
        wait_ms, _ = pace.prompt_ms(queued_tokens, attended)
    step_ms = (pace.fixed_us + pace.row_us * num_decoding) / US_PER_MS
    return Pace(
        pace.per_token_us, pace.per_attended_us, pace.chunk_tokens, pace.between_us, pace.room_us,
        wait_ms, step_ms, pace.idle_ms, pace.itl_target_ms, pace.fixed_us, pace.row_us,
    )  # fmt: skip


def trusts(num_steps: int, num_tokens: int) -> tuple[float, float]:
    """How far a model's times of steps, and of prompt tokens, are proven, each from 0 to 1. The
    model was accurate for `num_steps` steps and `num_tokens` prompt tokens."""
    steps = num_steps / (num_steps + STEPS)
    return steps, steps * num_tokens / (num_tokens + TOKENS)


def freshness(idle_us: int) -> float:
    """The share of its trust that a model keeps `idle_us` after its last step."""
    return exp2(-max(0, idle_us) / HALF_LIFE_US)


def typical_speed(
    pool: Iterable[WorkerSpeed | None], fleet: Iterable[WorkerSpeed | None]
) -> WorkerSpeed | None:
    """The medians over the workers of a pool, preferably those with fresh steps. If none of them is
    trusted, the medians over the trusted ones of the whole fleet, or over all; None without any."""
    of_pool = [each for each in pool if each is not None and each.token_trust >= TYPICAL_TRUST]
    fresh = [each for each in of_pool if each.token_trust * each.freshness >= TYPICAL_TRUST]
    known = fresh or of_pool
    if not known:
        known = [each for each in fleet if each is not None and each.is_known]
        known = [each for each in known if each.token_trust >= TYPICAL_TRUST] or known
    if not known:
        return None
    return msgspec.structs.replace(
        GUESS,
        fixed_us=median([each.fixed_us for each in known]),
        per_token_us=median([each.per_token_us for each in known]),
        per_attended_us=median([each.per_attended_us for each in known]),
    )


def _mix(typical: float, own: float, trust: float) -> float:
    return typical + (own - typical) * trust
