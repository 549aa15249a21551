"""Rows of a batch for tests of the sampler, and their distributions written out in plain Python."""

from __future__ import annotations

import math
from collections import Counter

import torch
from hypothesis import strategies as st

from engine.sampling.sample_row import SampleRow
from engine.sampling.sampler import Sampler
from engine.sampling.token_history import TokenHistory
from protocol.sampling import SamplingParams

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
