"""A worker's speed under its load: what a step with prompts takes."""

from __future__ import annotations

import pytest

from router.routing.pace import Pace, unloaded_pace
from router.routing.prediction import WorkerSpeed


@pytest.mark.parametrize(
    ("chunk_tokens", "queued_tokens", "step_ms"),
    [(512, 10, 3.0), (100, 400, 21.0), (512, 400, 50.0)],
    ids=["all that waits", "a chunk", "what the target of a step leaves room for"],
)
def test_a_step_computes_as_much_of_prompts_as_it_may(
    chunk_tokens: int, queued_tokens: int, step_ms: float
) -> None:
    """A token takes 0.2 ms, and the rest of the step 1 ms."""
    pace = Pace(
        per_token_us=200.0, per_attended_us=0.0, chunk_tokens=chunk_tokens, between_us=1000.0,
        room_us=49_000.0, wait_ms=0.0, step_ms=1.0, idle_ms=1.0, itl_target_ms=50.0,
    )  # fmt: skip
    assert pace.step_with_prompts_ms(queued_tokens) == step_ms


def test_times_of_steps_and_of_tokens_are_believed_by_trusts_of_their_own() -> None:
    typical = WorkerSpeed(1000.0, 100.0, 0.1, 512, 50.0, 0, 0)
    reported = WorkerSpeed(2000.0, 200.0, 0.2, 256, 30.0, 0, 0, step_trust=0.75, token_trust=0.25)
    pace = unloaded_pace(reported, typical)
    assert (pace.fixed_us, pace.per_token_us) == (1750.0, 125.0)
    assert pace.per_attended_us == pytest.approx(0.125)
    assert (pace.chunk_tokens, pace.itl_target_ms) == (256, 30.0)
