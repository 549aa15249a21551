"""The sampler against a reference written out row by row, and its promises as properties."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.sampling.chosen_tokens import read_tokens
from engine.sampling.row_parameters import RowNumbers, _mix64, uniform
from engine.sampling.sample_row import SampleRow
from engine.sampling.sampler import InvalidLogits, Sampler, adjust
from engine.sampling.token_history import TokenHistory
from protocol.errors import GenerationFailed
from protocol.sampling import SamplingParams
from tests.effort import times

VOCAB = 53


def row(index: int = 0, prompt: tuple = (), output: tuple = (), **params) -> SampleRow:
    fields = {"max_tokens": 100, "seed": 0} | params
    history = TokenHistory(prompt)
    history.extend(output)
    return SampleRow(SamplingParams(**fields), index, history)


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0, spread: float = 3.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((rows, vocab), generator=generator) * spread


def choices(logits: torch.Tensor, count: int, **params) -> Counter:
    """What `count` seeds choose from one row of logits."""
    rows = [row(seed=seed, **params) for seed in range(count)]
    sampled = Sampler(len(logits)).sample(logits.expand(count, -1), rows)
    return Counter(token.token_id for token in sampled)


def reference_adjusted(logits: list[float], sample_row: SampleRow) -> list[float]:
    """Logits after penalties, bias and mask, in plain Python."""
    params = sample_row.params
    values = list(logits)
    history = sample_row.history
    for token in history.seen_ids.tolist():
        penalty = params.repetition_penalty
        values[token] = values[token] * penalty if values[token] < 0 else values[token] / penalty
    counts = zip(history.output_ids.tolist(), history.output_counts.tolist(), strict=True)
    for token, count in counts:
        values[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, bias in (params.logit_bias or {}).items():
        values[token] += bias
    if sample_row.index < params.min_tokens:
        for token in params.stop_token_ids:
            values[token] = -math.inf
    return values


def reference_distribution(logits: list[float], sample_row: SampleRow) -> list[float]:
    """Probabilities after everything, in plain Python."""
    params = sample_row.params
    values = [value / params.temperature for value in reference_adjusted(logits, sample_row)]
    if params.top_k:
        kth = sorted(values, reverse=True)[min(params.top_k, len(values)) - 1]
        values = [value if value >= kth else -math.inf for value in values]
    weights = [math.exp(value - max(values)) for value in values]
    total, kept, lowest = sum(weights), 0.0, 0.0
    for weight in sorted(weights, reverse=True):
        kept, lowest = kept + weight, weight
        if kept >= params.top_p * total:
            break
    if params.top_p < 1:
        weights = [weight if weight >= lowest else 0.0 for weight in weights]
    weights = [weight if weight >= params.min_p else 0.0 for weight in weights]
    return [weight / sum(weights) for weight in weights]


def params_strategy():
    return st.fixed_dictionaries(
        {
            "seed": st.integers(-(2**70), 2**70),
            "temperature": st.sampled_from([0.3, 0.7, 1.0, 1.9]),
            "top_k": st.sampled_from([0, 1, 3, 20, VOCAB, 1000]),
            "top_p": st.sampled_from([0.05, 0.4, 0.9, 1.0]),
            "min_p": st.sampled_from([0.0, 0.02, 0.3, 1.0]),
            "repetition_penalty": st.sampled_from([1.0, 1.3, 0.7]),
            "presence_penalty": st.sampled_from([0.0, 0.9, -1.1]),
            "frequency_penalty": st.sampled_from([0.0, 0.4, -0.3]),
            "logit_bias": st.none()
            | st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -2.0, 3.0])),
            "min_tokens": st.sampled_from([0, 4]),
            "stop_token_ids": st.sampled_from([(), (0, 7)]),
        }
    )


def rows_strategy():
    tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)
    return st.builds(
        lambda fields, prompt, output: row(len(output), tuple(prompt), tuple(output), **fields),
        params_strategy(),
        tokens,
        tokens,
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


@settings(max_examples=times(15, 100), deadline=None, derandomize=True)
@given(rows=st.lists(rows_strategy(), min_size=1, max_size=6), logit_seed=st.integers(0, 1000))
def test_penalties_bias_and_mask_equal_the_reference(rows, logit_seed):
    logits = random_logits(len(rows), seed=logit_seed)
    adjusted = adjust(logits, RowNumbers.of(rows, VOCAB, logits.device).adjustments)
    for position, sample_row in enumerate(rows):
        expected = reference_adjusted(logits[position].tolist(), sample_row)
        torch.testing.assert_close(adjusted[position], torch.tensor(expected), rtol=0, atol=1e-4)


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


def test_consecutive_indices_of_one_seed_are_uniform_and_uncorrelated():
    numbers = [uniform(42, index) for index in range(20_000)]
    assert all(0 <= number < 1 for number in numbers)
    deciles = Counter(int(number * 10) for number in numbers)
    assert all(abs(deciles[decile] - 2_000) < 200 for decile in range(10))
    mean = sum(numbers) / len(numbers)
    pairs = itertools.pairwise(numbers)
    covariance = sum((a - mean) * (b - mean) for a, b in pairs) / len(numbers)
    assert abs(covariance / (1 / 12)) < 0.03


def test_the_generator_is_splitmix64_and_stays_the_same():
    """Workers of different versions must continue each other's texts."""
    golden = 0x9E3779B97F4A7C15
    assert _mix64(1234567 + golden) == 6457827717110365317  # the published test vector
    assert _mix64((1234567 + 2 * golden) % 2**64) == 3203168211198807973
    start = _mix64(7)
    assert uniform(7, 0) == (_mix64((start + golden) % 2**64) >> 11) / 2**53
    assert uniform(7, 4) == (_mix64((start + 5 * golden) % 2**64) >> 11) / 2**53
    assert uniform(7, 0) == uniform(7 + 2**64, 0)
    assert len({uniform(seed, index) for seed in range(50) for index in range(50)}) == 2_500


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
