"""Predicts the time to a first token and the time of a decode step from workers' step models.

Pure: no clocks, no sockets. A worker reports the coefficients of `scheduling.step_model`; a step
takes `fixed + per_token * tokens + per_attended * attended pairs`. The predictions leave out later
requests with a higher priority.
"""

from __future__ import annotations

import msgspec

from scheduling.step_model import attended_pairs

US_PER_MS = 1000.0


class WorkerSpeed(msgspec.Struct, frozen=True, gc=False):
    """A worker's data for predictions: its step model (microseconds), its limits, its load.

    `num_decodes` sequences decode there; `context_tokens` is the sum of their contexts. The step
    model was accurate for `proven_tokens` prompt tokens computed there. `step_trust` and
    `token_trust`: how far its times of steps and of prompt tokens were proven, from 0 to 1;
    `freshness`, from 0 to 1, falls from the last step on.
    """

    fixed_us: float
    per_token_us: float
    per_attended_us: float
    chunk_max_tokens: int
    itl_target_ms: float
    num_decodes: int
    context_tokens: int
    proven_tokens: int = 0
    step_trust: float = 0.0
    token_trust: float = 0.0
    freshness: float = 1.0

    @property
    def is_known(self) -> bool:
        """Whether the worker has reported a step model."""
        return self.fixed_us + self.per_token_us > 0


def decode_step_ms(speed: WorkerSpeed, more: int = 0) -> float:
    """The time of a step in which the worker's sequences, and `more` like them, decode one token
    each."""
    rows = max(1, speed.num_decodes + more)
    context = speed.context_tokens / max(1, speed.num_decodes) * rows
    took_us = speed.fixed_us + speed.per_token_us * rows + speed.per_attended_us * context
    return took_us / US_PER_MS


def ttft_ms(speed: WorkerSpeed, queued_tokens: int, num_tokens: int, cached_tokens: int) -> float:
    """From the dispatch of a prompt of `num_tokens` to its first token.

    `queued_tokens` of other prompts come first; these prompts are assumed to be as long as this
    one. Beside running decodes, a step computes only as much as `itl_target_ms` leaves room for.
    """
    missing = max(1, num_tokens - cached_tokens)
    attended = attended_pairs(missing, min(cached_tokens, num_tokens - 1))
    attended += queued_tokens * num_tokens // 2
    return _steps_ms(speed, queued_tokens + missing, attended)


def least_wait_ms(speed: WorkerSpeed, ahead_tokens: int) -> float:
    """A lower bound for the time of `ahead_tokens` prompt tokens: nothing decodes beside them, and
    their contexts are short. 0 unless the step model has been accurate for as many tokens before,
    because its initial guess may be far too slow."""
    if ahead_tokens > speed.proven_tokens:
        return 0.0
    num_steps = -(-ahead_tokens // max(1, speed.chunk_max_tokens))
    return (speed.per_token_us * ahead_tokens + num_steps * speed.fixed_us) / US_PER_MS


def _steps_ms(speed: WorkerSpeed, tokens: int, attended: int) -> float:
    """The time of the steps that compute this many prompt tokens."""
    work_us = speed.per_token_us * tokens + speed.per_attended_us * attended
    num_steps = -(-tokens // max(1, speed.chunk_max_tokens))
    decode_us = speed.fixed_us
    if speed.num_decodes:
        decode_us = decode_step_ms(speed) * US_PER_MS
        room_us = max(speed.itl_target_ms * US_PER_MS - decode_us, decode_us / 4)
        num_steps = max(num_steps, -int(-work_us // room_us))
    return (work_us + num_steps * decode_us) / US_PER_MS
