"""A worker's speed under its load: what a step with prompts takes."""

from __future__ import annotations

import msgspec
import pytest

from router.routing.pace import Pace, freshness, typical_speed, unloaded_pace
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
    old = unloaded_pace(msgspec.structs.replace(reported, freshness=0.5), typical)
    assert (old.fixed_us, old.per_token_us) == (1375.0, 112.5)


def test_a_clock_that_goes_back_makes_no_model_fresher_than_new() -> None:
    assert freshness(-(10**12)) == 1.0


def speed(fixed_us: float, token_trust: float = 1.0, freshness: float = 1.0) -> WorkerSpeed:
    return WorkerSpeed(
        fixed_us, 0.0, 0.0, 512, 50.0, 0, 0, token_trust=token_trust, freshness=freshness
    )


UNTRUSTED, OLD, FRESH, UNKNOWN = speed(1.0, 0.2), speed(2.0, 1.0, 0.2), speed(3.0), speed(0.0)


@pytest.mark.parametrize(
    ("pool", "others", "fixed_us"),
    [
        ([UNTRUSTED, OLD, OLD, FRESH], [], 3.0),
        ([UNTRUSTED, OLD], [FRESH], 2.0),
        ([UNTRUSTED], [UNTRUSTED, OLD], 2.0),
        ([UNTRUSTED, None], [UNKNOWN, None], 1.0),
    ],
    ids=["fresh ones of the pool", "any of the pool", "trusted ones of the fleet", "all known"],
)
def test_the_workers_that_a_typical_speed_is_the_median_of(
    pool: list[WorkerSpeed | None], others: list[WorkerSpeed | None], fixed_us: float
) -> None:
    found = typical_speed(pool, [*pool, *others])
    assert found is not None
    assert found.fixed_us == fixed_us
    assert typical_speed([None], [UNKNOWN, None]) is None
