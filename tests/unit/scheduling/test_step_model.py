"""The step model learns a machine's coefficients and inverts them into a token budget."""

from __future__ import annotations

import csv
import gzip
import random
from pathlib import Path

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


def test_it_adapts_to_a_slower_machine_after_many_alike_steps() -> None:
    model, cost = StepModel(), StepCost().plus(1, 100)
    for _ in range(20_000):
        model.observe(cost, 3e-3)
    for _ in range(200):
        model.observe(cost, 6e-3)
    assert model.predict(cost) == pytest.approx(6e-3, rel=0.05)


def test_its_predictions_do_not_stray_on_a_busy_machine() -> None:
    """The steps of a decode worker whose machine had three times more to do than it has cores: most
    computed one token, in 2 to 79 ms, and few computed a part of a prompt."""
    path = Path(__file__).parent / "busy_steps.csv.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        steps = [{name: int(value) for name, value in row.items()} for row in csv.DictReader(file)]
    decode, chunk = StepCost().plus(1, 200), StepCost().plus(64, 0)
    model = StepModel()
    predicted = []
    for step in steps:
        model.observe(StepCost(step["num_tokens"], step["attended"]), step["step_us"] / 1e6)
        predicted.append((model.predict(decode), model.predict(chunk)))
    decode_s, chunk_s = zip(*predicted[50:], strict=True)
    assert all(4e-3 < each < 20e-3 for each in decode_s), "the median step took 8 ms"
    assert all(13e-3 < each < 50e-3 for each in chunk_s), "the median chunk took 26 ms"


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
