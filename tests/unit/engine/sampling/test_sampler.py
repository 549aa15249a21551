"""The sampler against a reference written out row by row, and its promises as properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.sampling.chosen_tokens import read_tokens
from engine.sampling.row_parameters import uniform
from engine.sampling.sampler import InvalidLogits, Sampler
from protocol.errors import GenerationFailed
from tests.effort import times
from tests.unit.engine.sampling.sample_rows import (
    VOCAB,
    choices,
    random_logits,
    reference_distribution,
    row,
    rows_strategy,
)


@settings(max_examples=times(15, 100), deadline=None, derandomize=True)
@given(rows=st.lists(rows_strategy(), min_size=1, max_size=4), logit_seed=st.integers(0, 1000))
def test_choices_follow_the_reference_by_inverse_cdf(rows, logit_seed):
    logits = random_logits(len(rows), seed=logit_seed, spread=1.5)
    before = logits.clone()
    distributions = [
        reference_distribution(logits[position].tolist(), sample_row)
        for position, sample_row in enumerate(rows)
    ]
    for shift in range(16):
        shifted = [replace(r, params=replace(r.params, seed=r.params.seed + shift)) for r in rows]
        sampled = Sampler(VOCAB).sample(logits, shifted)
        for token, sample_row, expected in zip(sampled, shifted, distributions, strict=True):
            target = uniform(sample_row.params.seed, sample_row.index)
            below, above = sum(expected[: token.token_id]), sum(expected[: token.token_id + 1])
            assert expected[token.token_id] > 0
            assert below - 1e-5 <= target <= above + 1e-5
    assert torch.equal(logits, before)


@pytest.mark.parametrize(("number", "expected"), [(0.0, 2), (1 - 2**-53, 4)])
def test_the_ends_of_the_unit_interval_choose_possible_tokens(monkeypatch, number, expected):
    monkeypatch.setattr("engine.sampling.row_parameters.uniform", lambda seed, index: number)
    logits = torch.tensor([[-math.inf, -math.inf, 1.0, 2.0, 0.5, -math.inf]])
    (token,) = Sampler(6).sample(logits, [row()])
    assert token.token_id == expected


@settings(max_examples=times(12, 60), deadline=None, derandomize=True)
@given(rows=st.lists(rows_strategy(), min_size=2, max_size=9), data=st.data())
def test_a_choice_does_not_depend_on_the_batch(rows, data):
    logits = random_logits(len(rows))
    sampler = Sampler(VOCAB)
    together = sampler.sample(logits, rows)
    order = data.draw(st.permutations(range(len(rows))))
    part = order[: data.draw(st.integers(1, len(rows)))]
    assert sampler.sample(logits[part], [rows[i] for i in part]) == [together[i] for i in part]
    for i, sample_row in enumerate(rows):
        assert sampler.sample(logits[i : i + 1], [sample_row]) == [together[i]]


def test_a_choice_does_not_depend_on_threads_or_alignment():
    """A large, odd vocabulary: rows begin at every alignment, and work is split."""
    vocab = 50_257
    logits = random_logits(8, vocab, spread=1.0)
    rows = [row(seed=i, top_p=0.95 if i % 2 else 1.0, logprobs=3) for i in range(8)]
    sampler = Sampler(vocab)
    together = sampler.sample(logits, rows)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            alone = [sampler.sample(logits[i : i + 1].clone(), [rows[i]])[0] for i in range(8)]
            assert alone == together
    finally:
        torch.set_num_threads(before)


def test_greedy_takes_the_largest_whatever_the_seed_and_filters():
    logits = random_logits(4)
    rows = [row(seed=i, temperature=0.0, top_k=i, top_p=0.1 + 0.2 * i) for i in range(4)]
    ids = [token.token_id for token in Sampler(VOCAB).sample(logits, rows)]
    assert ids == logits.argmax(-1).tolist()


def test_greedy_and_random_rows_mix():
    logits = random_logits(6)
    rows = [row(seed=i, temperature=i % 2 * 1.5) for i in range(6)]
    sampler = Sampler(VOCAB)
    together = sampler.sample(logits, rows)
    assert [t.token_id for t in together[::2]] == logits[::2].argmax(-1).tolist()
    assert together[1::2] == sampler.sample(logits[1::2], rows[1::2])
    random_ids = [token.token_id for token in together[1::2]]
    assert random_ids != logits[1::2].argmax(-1).tolist()  # so randomness was at work


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.6}, {"temperature": 1.7}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.02}],
    ids=str,
)
def test_frequencies_match_the_distribution(params):
    """Chi-square over fixed seeds; the 0.1% quantile by Wilson and Hilferty."""
    count = times(6_000, 20_000)
    logits = random_logits(1, 24, seed=5, spread=1.5)[0]
    observed = choices(logits, count, **params)
    expected = reference_distribution(logits.tolist(), row(**params))
    cells = [(observed[i], count * p) for i, p in enumerate(expected) if count * p >= 5]
    assert sum(observed[i] for i, p in enumerate(expected) if p == 0) == 0
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    freedom = len(cells) - 1
    assert freedom >= 3
    spread = 2 / (9 * freedom)
    assert statistic < freedom * (1 - spread + 3.09 * math.sqrt(spread)) ** 3


def test_logprobs_are_the_models_own():
    logits = random_logits(4)
    rows = [
        row(seed=1),
        row(seed=2, logprobs=0),
        row(seed=3, logprobs=3, temperature=0.3, logit_bias={0: 50.0}),
        row(seed=4, logprobs=20, temperature=0.0, repetition_penalty=2.0, prompt=(1, 2)),
    ]
    sampled = Sampler(VOCAB).sample(logits, rows)
    expected = logits.log_softmax(-1)
    assert (sampled[0].logprob, sampled[0].top) == (None, ())
    assert sampled[1].top == ()
    assert sampled[2].token_id == 0
    for token, logprobs, count in zip(sampled[1:], expected[1:], (0, 3, 20), strict=True):
        assert token.logprob == pytest.approx(float(logprobs[token.token_id]), abs=1e-5)
        best = logprobs.topk(count)
        assert [i for i, _ in token.top] == best.indices.tolist()
        assert [value for _, value in token.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_a_vocabulary_smaller_than_the_logprobs_asked_for():
    (token,) = Sampler(5).sample(random_logits(1, 5), [row(logprobs=20)])
    assert len(token.top) == 5


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_finite_largest_logit_are_named(bad, temperature):
    logits = random_logits(4)
    logits[1, 5] = bad
    logits[3] = -math.inf
    rows = [row(temperature=temperature) for _ in range(4)]
    with pytest.raises(InvalidLogits) as raised:
        Sampler(VOCAB).sample(logits, rows)
    assert raised.value.rows == [1, 3]
    assert isinstance(raised.value, GenerationFailed)
    good = [0, 2]
    assert len(Sampler(VOCAB).sample(logits[good], [rows[i] for i in good])) == 2


def test_a_row_in_which_nothing_is_allowed_is_named_apart():
    logits = random_logits(3)
    logits[0, 1] = math.nan
    nothing = np.zeros(2, dtype=np.int32)
    with pytest.raises(InvalidLogits) as raised:
        Sampler(VOCAB).sample(logits, [row(), row(), replace(row(), allowed=nothing)])
    assert (raised.value.rows, raised.value.forbidden_rows) == ([0], [2])


@settings(max_examples=times(12, 60), deadline=None, derandomize=True)
@given(rows=st.lists(rows_strategy(), min_size=1, max_size=6), logit_seed=st.integers(0, 1000))
def test_what_is_chosen_for_later_is_what_is_sampled(rows, logit_seed):
    logits = random_logits(len(rows), seed=logit_seed)
    wanted = replace(rows[-1].params, logprobs=2)
    rows[-1] = replace(rows[-1], params=wanted)
    chosen = Sampler(VOCAB).choose(logits, rows).on_host()
    assert bool(chosen.is_chosen.all())
    assert read_tokens(chosen.ids, chosen.logprobs) == Sampler(VOCAB).sample(logits, rows)


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5, "top_k": 9}, {"temperature": 0.0}])
def test_rows_from_which_nothing_is_chosen_say_why_and_have_some_token(filters):
    logits = random_logits(4)
    logits[0, 1] = math.nan
    logits[3] = -math.inf
    nothing = np.zeros(2, dtype=np.int32)
    rows = [row(**filters), row(**filters), replace(row(**filters), allowed=nothing), row()]
    chosen = Sampler(VOCAB).choose(logits, rows)
    assert chosen.is_chosen.tolist() == [False, True, False, False]
    assert chosen.is_finite.tolist() == [False, True, True, False]
    assert chosen.ids[[0, 2, 3]].tolist() == [0, 0, 0]
    assert chosen.ids[1] == Sampler(VOCAB).sample(logits[1:2], rows[1:2])[0].token_id


def test_an_empty_batch():
    assert len(Sampler(VOCAB).choose(torch.empty((0, VOCAB)), []).ids) == 0
    assert Sampler(VOCAB).sample(torch.empty((0, VOCAB)), []) == []
