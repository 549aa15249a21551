"""The step model learns a machine's coefficients and inverts them into a token budget."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduling.step_model import StepCost, StepModel, attended_pairs


def test_attended_pairs_counts_each_query_with_the_keys_up_to_itself() -> None:
    assert attended_pairs(3, 5) == 6 + 7 + 8


@pytest.mark.parametrize("true", [(2e-3, 5e-5, 2e-8), (5e-4, 1e-3, 1e-7)])
def test_it_learns_the_coefficients_of_a_noisy_machine(true: tuple[float, float, float]) -> None:
    rng = random.Random(7)
    model = StepModel()
    for _ in range(400):
        cost = StepCost().plus(rng.randrange(1, 512), rng.randrange(0, 4000))
        seconds = true[0] + true[1] * cost.num_tokens + true[2] * cost.attended
        model.observe(cost, seconds * rng.uniform(0.97, 1.03))
    for tokens, context in [(1, 100), (64, 0), (512, 3000)]:
        cost = StepCost().plus(tokens, context)
        exact = true[0] + true[1] * cost.num_tokens + true[2] * cost.attended
        assert model.predict(cost) == pytest.approx(exact, rel=0.25, abs=2e-3)


def test_steps_of_one_kind_for_a_long_time_do_not_break_it() -> None:
    model = StepModel()
    for _ in range(20_000):
        model.observe(StepCost().plus(1, 100), 3e-3)
    assert model.predict(StepCost().plus(1, 100)) == pytest.approx(3e-3, rel=0.01)
    model.observe(StepCost().plus(256, 0), 20e-3)
    assert 1e-3 < model.predict(StepCost().plus(1, 100)) < 6e-3


@settings(derandomize=True, deadline=None)
@given(
    budget=st.floats(0.0, 0.2),
    context=st.integers(0, 5000),
    limit=st.integers(1, 1024),
    coefficients=st.tuples(
        st.floats(0, 5e-3), st.floats(1e-6, 1e-3), st.sampled_from([0.0, 1e-9, 1e-7])
    ),
)
def test_tokens_within_is_the_most_that_fits(
    budget: float, context: int, limit: int, coefficients: tuple[float, float, float]
) -> None:
    model = StepModel(*coefficients)
    base = StepCost().plus(1, 200)
    size = model.tokens_within(budget, base, context, limit)
    assert 0 <= size <= limit
    if size > 0:
        assert model.predict(base.plus(size, context)) <= budget + 1e-9
    if size < limit:
        assert model.predict(base.plus(size + 1, context)) > budget - 1e-9


def test_without_a_budget_only_the_limit_binds():
    assert StepModel().tokens_within(float("inf"), StepCost(8, 4_096), 512, 2_048) == 2_048
