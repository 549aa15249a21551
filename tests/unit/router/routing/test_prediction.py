"""Predictions equal the steps that a scheduler would run, added up."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.routing.prediction import WorkerSpeed, decode_step_ms, least_wait_ms, ttft_ms
from scheduling.step_model import StepCost, StepModel

SPEED = WorkerSpeed(1000.0, 50.0, 0.01, 512, 50.0, 0, 0)


@given(st.integers(1, 20_000), st.integers(0, 19_999), st.integers(16, 2048))
def test_a_prompt_alone_takes_the_sum_of_its_chunks(
    num_tokens: int, cached: int, chunk: int
) -> None:
    cached = min(cached, num_tokens - 1)
    speed = msgspec.structs.replace(SPEED, chunk_max_tokens=chunk)
    model = StepModel(1e-3, 50e-6, 0.01e-6)
    total_s, at = 0.0, cached
    while at < num_tokens:
        size = min(chunk, num_tokens - at)
        total_s += model.predict(StepCost().plus(size, at))
        at += size
    assert ttft_ms(speed, 0, num_tokens, cached) == pytest.approx(total_s * 1000, rel=1e-6)


def test_a_decode_step_is_what_the_step_model_says() -> None:
    speed = msgspec.structs.replace(SPEED, num_decodes=8, context_tokens=8000)
    model = StepModel(1e-3, 50e-6, 0.01e-6)
    cost = StepCost()
    for _ in range(8):
        cost = cost.plus(1, 999)
    assert decode_step_ms(speed) == pytest.approx(model.predict(cost) * 1000)
    assert decode_step_ms(speed, more=8) > decode_step_ms(speed)


@given(st.integers(0, 100_000), st.integers(1, 8000), st.integers(0, 64))
def test_more_load_never_predicts_less(queued: int, num_tokens: int, decodes: int) -> None:
    base = ttft_ms(SPEED, queued, num_tokens, 0)
    assert ttft_ms(SPEED, queued + 64, num_tokens, 0) > base
    assert ttft_ms(SPEED, queued, num_tokens + 1, 0) > base
    assert ttft_ms(SPEED, queued, num_tokens, num_tokens // 2) <= base
    busy = msgspec.structs.replace(SPEED, num_decodes=decodes, context_tokens=decodes * 500)
    assert ttft_ms(busy, queued, num_tokens, 0) >= base


def test_chunks_beside_decodes_keep_to_the_inter_token_target() -> None:
    busy = msgspec.structs.replace(SPEED, num_decodes=10, context_tokens=0, itl_target_ms=11.5)
    # a step has 1.5 ms of decodes and room for 10 ms: 200 tokens of 50 us
    plain = msgspec.structs.replace(busy, per_attended_us=0.0)
    assert ttft_ms(plain, 0, 1000, 0) == pytest.approx(50 + 5 * 1.5)


@given(st.integers(0, 100_000), st.integers(0, 100_000), st.integers(0, 64))
def test_the_least_wait_is_never_more_than_the_prediction(
    ahead: int, proven: int, decodes: int
) -> None:
    busy = msgspec.structs.replace(
        SPEED, num_decodes=decodes, context_tokens=decodes * 500, proven_tokens=proven
    )
    least = least_wait_ms(busy, ahead)
    assert least < ttft_ms(busy, ahead, 1, 0)
    assert (least > 0) == (0 < ahead <= proven)


def test_without_a_step_model_nothing_is_known() -> None:
    assert SPEED.is_known
    assert not WorkerSpeed(0.0, 0.0, 0.0, 512, 50.0, 0, 0).is_known
