"""The last layer is computed of wanted tokens alone: what comes out, and what lies in the pool, is
what a whole step gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.base import Segment, wanted_rows
from protocol.layout import FP8

FIRST, SECOND, THIRD = list(range(60, 40, -1)), list(range(20)), list(range(20, 40))
BATCHES = [  # of (tokens from, to, table), and how many of each are wanted
    ([(0, 37, FIRST)], [0]),
    ([(37, 38, FIRST), (0, 30, SECOND), (0, 25, THIRD)], [1, 1, 0]),
    ([(38, 39, FIRST), (30, 50, SECOND), (25, 26, THIRD)], [1, 7, 1]),
    ([(39, 60, FIRST), (50, 60, SECOND)], [1, 10]),
    ([(26, 27, THIRD)], [1]),
]
KINDS = [
    ("LlamaForCausalLM", {}, torch.float32, False, None),
    ("Qwen3ForCausalLM", {}, torch.float32, True, None),
    ("LlamaForCausalLM", {"num_hidden_layers": 1}, torch.bfloat16, True, None),
    ("LlamaForCausalLM", {"num_attention_heads": 4, "head_dim": 32}, torch.bfloat16, True, None),
    ("MistralForCausalLM", {"sliding_window": 24}, torch.bfloat16, True, None),
    ("Qwen2ForCausalLM", {}, torch.bfloat16, True, None),
    ("Qwen3ForCausalLM", {}, torch.bfloat16, True, FP8),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_wanted_token_gets_what_it_would_get_among_all(
    make_tiny, paged_model, text, kernels, kind, threads
):
    architecture, overrides, dtype, by_kernels, kv_dtype = kind
    tiny = make_tiny(architecture, dtype=dtype, **overrides)
    torch.set_num_threads(threads)
    used = kernels if by_kernels else None
    whole, part = (paged_model(tiny.folder, kernels=used, kv_dtype=kv_dtype) for _ in range(2))
    if dtype == torch.bfloat16 and kernels.baton_has_linear():
        assert part.model._fused is not None
    tokens = text(60)
    for spans, counts in BATCHES:
        parts = [(tokens[start:end], start, table) for start, end, table in spans]
        segments = [Segment(e - s, e, t, c) for (s, e, t), c in zip(spans, counts, strict=True)]
        expected = whole.step(parts)
        rows = wanted_rows(segments)
        expected = expected if rows is None else expected[rows]
        got = part.step(parts, counts)
        assert got.shape == expected.shape == (sum(counts), 97)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        pools = [each.pool.tensor.view(torch.uint8) for each in (whole, part)]
        assert torch.equal(*pools)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6))
def test_the_wanted_rows_are_the_last_of_each_segment(spans):
    segments = [Segment(size, size, [0], min(size, wanted)) for size, wanted in spans]
    is_wanted = [at >= s.query_len - s.wanted_len for s in segments for at in range(s.query_len)]
    expected = [row for row, wanted in enumerate(is_wanted) if wanted]
    assert wanted_rows(segments) == (None if all(is_wanted) else expected)


def test_a_segment_has_no_more_wanted_tokens_than_tokens():
    assert Segment(3, 5, [0, 1]).wanted_len == 3
    for wanted in (-1, 4):
        with pytest.raises(AssertionError):
            Segment(3, 5, [0, 1], wanted)
