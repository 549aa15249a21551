"""Factors by which simulated steps take longer or shorter than predicted."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from protocol.messages import Role
from router.routing.decision import decide
from simulator.devices.step_noise import StepNoise
from simulator.fleet import Fleet, FleetSpec, Outcome
from tests.unit.simulator.fleets import served, single, worker_spec

NOISE = StepNoise(
    chunks=((0.01, ((1.0,), (1.1,))), (0.02, ((1.2,), (1.3,)))), decodes=((0.01, ((2.0,),)),)
)


@pytest.mark.parametrize(
    ("has_chunks", "predicted_s", "num_computing", "factor"),
    [
        (True, 0.005, 0, 1.0),
        (True, 0.010, 1, 1.1),
        (True, 0.011, 0, 1.2),
        (True, 0.500, 5, 1.3),
        (False, 0.500, 1, 2.0),
    ],
)
def test_a_factor_is_that_of_steps_of_the_same_kind_length_and_surroundings(
    has_chunks: bool, predicted_s: float, num_computing: int, factor: float
) -> None:
    assert NOISE.draw(has_chunks, predicted_s, num_computing, random.Random(0)) == factor


def test_draws_are_equally_likely_and_depend_on_the_seed_alone() -> None:
    noise = StepNoise(NOISE.chunks, ((1.0, ((0.5, 1.5),)),))
    first, second = random.Random(3), random.Random(3)
    drawn = [noise.draw(False, 0.1, 0, first) for _ in range(1000)]
    assert 400 < drawn.count(0.5) < 600
    assert drawn == [noise.draw(False, 0.1, 0, second) for _ in range(1000)]


@pytest.mark.parametrize(("alone", "beside"), [(1.0, 2.0), (3.0, 1.0)])
def test_simulated_steps_take_longer_by_their_factor(alone: float, beside: float) -> None:
    """The second request arrives while the other worker decodes."""
    factors = ((1.0, ((alone,), (beside,))),)
    one, other = (
        run(StepNoise(factors, factors) if is_noisy else None) for is_noisy in (False, True)
    )
    assert ttft_s(other, 0) == pytest.approx(alone * ttft_s(one, 0), rel=0.05)
    assert ttft_s(other, 1) == pytest.approx(beside * ttft_s(one, 1), rel=0.05)


def run(noise: StepNoise | None) -> Outcome:
    spec = replace(worker_spec(Role.DECODE, num_blocks=256), noise=noise, max_leap=1)
    fleet = FleetSpec(((spec, 2),), lambda: decide, link_bytes_per_s=1e9)
    return served(Fleet(fleet, seed=7), single(0.0, 400, 400), single(1.7, 400, 4))


def ttft_s(outcome: Outcome, number: int) -> float:
    return outcome.requests[number].ttft_s
