"""Penalties, masks and cuts that leave a row fewer tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.sampling.row_parameters import RowNumbers
from engine.sampling.sampler import Sampler, adjust
from tests.effort import times
from tests.unit.engine.sampling.sample_rows import (
    VOCAB,
    choices,
    random_logits,
    reference_adjusted,
    row,
    rows_strategy,
)


@settings(max_examples=times(15, 100), deadline=None, derandomize=True)
@given(rows=st.lists(rows_strategy(), min_size=1, max_size=6), logit_seed=st.integers(0, 1000))
def test_penalties_bias_and_mask_equal_the_reference(rows, logit_seed):
    logits = random_logits(len(rows), seed=logit_seed)
    adjusted = adjust(logits, RowNumbers.of(rows, VOCAB, logits.device).adjustments)
    for position, sample_row in enumerate(rows):
        expected = reference_adjusted(logits[position].tolist(), sample_row)
        torch.testing.assert_close(adjusted[position], torch.tensor(expected), rtol=0, atol=1e-4)


@pytest.mark.parametrize("k", [1, 2, 7, 52])
def test_top_k_keeps_exactly_the_k_largest(k):
    logits = random_logits(1, spread=0.2)[0]
    assert set(choices(logits, 3_000, top_k=k)) == set(logits.topk(k).indices.tolist())


def test_top_k_keeps_ties_together():
    logits = torch.tensor([0.0, 1.0, 1.0, 1.0, -1.0])
    assert set(choices(logits, 500, top_k=2)) == {1, 2, 3}


@pytest.mark.parametrize("p", [0.01, 0.3, 0.75, 0.99])
def test_top_p_keeps_the_smallest_sufficient_set(p):
    logits = random_logits(1, 12, spread=0.5)[0]
    probabilities = logits.softmax(-1)
    kept = set(choices(logits, 3_000, top_p=p))
    mass = float(probabilities[list(kept)].sum())
    smallest = float(probabilities[list(kept)].min())
    assert mass >= p > mass - smallest
    assert kept == set(probabilities.topk(len(kept)).indices.tolist())


def test_top_p_over_more_tokens_than_it_looks_at_first():
    logits = random_logits(1, 3_000, spread=0.01)[0]
    kept = choices(logits, 3_000, top_p=0.5)
    order = logits.argsort(descending=True).tolist()
    cumulative = logits.softmax(-1)[order].double().cumsum(0)
    allowed = set(order[: int((cumulative < 0.5).sum()) + 1])
    assert 1_400 < len(allowed) < 1_500
    assert set(kept) <= allowed
    assert len(kept) > 1_200


def test_min_tokens_keeps_stop_ids_away_until_reached():
    logits = torch.full((3, VOCAB), -2.0)
    logits[:, 9] = 30.0
    logits[:, 4] = 5.0
    params = {"min_tokens": 2, "stop_token_ids": (9, VOCAB + 5), "temperature": 0.0}
    rows = [row(index=index, **params) for index in range(3)]
    assert [t.token_id for t in Sampler(VOCAB).sample(logits, rows)] == [4, 4, 9]


def test_bias_outside_the_vocabulary_touches_no_other_row():
    logits = random_logits(2)
    rows = [row(temperature=0.0, logit_bias={VOCAB: 100.0, -1: 100.0}), row(temperature=0.0)]
    ids = [token.token_id for token in Sampler(VOCAB).sample(logits, rows)]
    assert ids == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-2])
def test_tiny_temperatures_stay_finite(temperature):
    logits = random_logits(1, spread=1000.0)
    (token,) = Sampler(VOCAB).sample(logits, [row(temperature=temperature, top_p=0.9)])
    assert token.token_id == int(logits.argmax())


def test_extreme_logits_with_filters_that_leave_one_token():
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, 17] = -3e38
    (token,) = Sampler(VOCAB).sample(logits, [row(top_k=5, top_p=0.5, min_p=0.5)])
    assert token.token_id == 17


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("spare_words", [0, 1])
def test_a_mask_leaves_what_it_allows_and_touches_no_other_row(temperature, spare_words):
    logits = random_logits(3)
    rows = [row(seed=seed, temperature=temperature) for seed in range(3)]
    free = Sampler(VOCAB).sample(logits, rows)
    for token in (0, 31, 32, VOCAB - 1):
        words = np.full(-(-VOCAB // 32) + spare_words, 0, dtype=np.int32)
        words[token // 32] = np.uint32(1 << token % 32).astype(np.int32)
        masked = Sampler(VOCAB).sample(logits, [rows[0], replace(rows[1], allowed=words), rows[2]])
        assert [each.token_id for each in masked] == [free[0].token_id, token, free[2].token_id]


def test_forbidden_ids_are_never_chosen():
    logits = random_logits(1)
    best = int(logits.argmax())
    (token,) = Sampler(VOCAB).sample(logits, [replace(row(temperature=0.0), forbidden=[best])])
    assert token.token_id != best
