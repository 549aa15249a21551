"""The paged torch backend against dense attention written out, over hostile pools."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.base import Segment
from engine.attention.torch_attention import TorchAttention
from engine.kv_pool import KvPool
from protocol.layout import KvLayout
from tests.effort import times

HEAD_DIM = 8
NUM_BLOCKS = 600


def make_pool(
    num_kv_heads: int, block_size: int, num_layers: int = 2, dtype: str = "float32"
) -> KvPool:
    layout = KvLayout(
        model_fingerprint="x",
        dtype=dtype,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim=HEAD_DIM,
    )
    pool = KvPool(layout, NUM_BLOCKS)
    pool.tensor.fill_(torch.nan)
    return pool


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """Attention of the last len(q) positions over all of k, v: heads repeated, in float64."""
    group = q.shape[1] // k.shape[1]
    keys = k.double().repeat_interleave(group, dim=1)
    values = v.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) / math.sqrt(q.shape[2])
    distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    visible = (distance >= 0) & (distance < (window or len(k)))
    scores = scores.masked_fill(~visible, -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


@dataclass
class Text:
    """One sequence: its k and v for each layer, and where they lie."""

    k: torch.Tensor  # [layers, length, kv heads, D]
    v: torch.Tensor
    table: list[int]


def make_texts(lengths: list[int], num_layers: int, num_kv_heads: int, block_size: int):
    generator = torch.Generator().manual_seed(sum(lengths))
    free = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
    texts = []
    for length in lengths:
        shape = (num_layers, length, num_kv_heads, HEAD_DIM)
        table = [free.pop() for _ in range(-(-length // block_size))]
        texts.append(
            Text(
                torch.randn(shape, generator=generator),
                torch.randn(shape, generator=generator),
                table,
            )
        )
    return texts


def assert_equals_dense(
    attention: TorchAttention, texts: list[Text], spans: list[tuple[int, int]], num_heads: int
):
    """All layers, run for positions spans[i] of texts[i] in one batch, give what `dense` gives."""
    attention.plan(
        [
            Segment(end - start, end, [*text.table, 10**6, 10**6])  # what follows does not matter
            for text, (start, end) in zip(texts, spans, strict=True)
        ]
    )
    generator = torch.Generator().manual_seed(99)
    for layer, window in enumerate(attention._windows):
        rows = [slice(start, end) for start, end in spans]
        k = torch.cat([text.k[layer, r] for text, r in zip(texts, rows, strict=True)])
        v = torch.cat([text.v[layer, r] for text, r in zip(texts, rows, strict=True)])
        q = torch.randn((len(k), num_heads, HEAD_DIM), generator=generator)
        out = attention.run(layer, q, k, v)
        assert out.shape == q.shape
        at = 0
        for text, (start, end) in zip(texts, spans, strict=True):
            n = end - start
            expected = dense(q[at : at + n], text.k[layer, :end], text.v[layer, :end], window)
            torch.testing.assert_close(out[at : at + n].double(), expected, rtol=0, atol=1e-5)
            at += n


@settings(max_examples=times(25, 60), deadline=None, derandomize=True)
@given(
    texts=st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=6
    ),  # (tokens before, tokens now); one now is a decode
    decodes=st.integers(0, 5),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1), (3, 3)]),
    block_size=st.sampled_from([1, 4, 16]),
    windows=st.sampled_from([(None, None), (5, None), (1, 17)]),
    max_mask_elements=st.sampled_from([1, 50, 1 << 22]),
)
def test_any_batch_equals_dense_attention(
    texts, decodes, heads, block_size, windows, max_mask_elements
):
    num_heads, num_kv_heads = heads
    texts = texts + [(7 * n, 1) for n in range(decodes)]
    pool = make_pool(num_kv_heads, block_size)
    attention = TorchAttention(pool, windows, max_mask_elements)
    made = make_texts([before + now for before, now in texts], 2, num_kv_heads, block_size)
    befores = [(text, before) for text, (before, _) in zip(made, texts, strict=True) if before]
    if befores:
        assert_equals_dense(
            attention, [t for t, _ in befores], [(0, b) for _, b in befores], num_heads
        )
    assert_equals_dense(attention, made, [(b, b + n) for b, n in texts], num_heads)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("window", [None, 3])
def test_garbage_beyond_the_context_never_shows(garbage, window):
    """Stale slots of a sequence's own blocks, padding, and keys that left the window."""
    pool = make_pool(num_kv_heads=2, block_size=8)
    pool.tensor.fill_(garbage)
    attention = TorchAttention(pool, (window, window))
    lengths = [1, 3, 8, 9, 30]
    texts = make_texts(lengths, 2, 2, 8)
    before = [(t, (0, n - 1)) for t, n in zip(texts, lengths, strict=True) if n > 1]
    assert_equals_dense(attention, [t for t, _ in before], [s for _, s in before], 4)
    if window:  # of the last text, no later query sees a position below 26
        for position in range(26):
            pool.tensor[texts[-1].table[position // 8], :, :, :, position % 8] = garbage
    assert_equals_dense(attention, texts, [(n - 1, n) for n in lengths], 4)
    assert_equals_dense(attention, texts[-1:], [(28, 30)], 4)


def test_only_the_batchs_own_slots_are_written():
    pool = make_pool(num_kv_heads=2, block_size=4)
    pool.tensor.fill_(7.0)
    attention = TorchAttention(pool, (None, None))
    (text,) = make_texts([10], 2, 2, 4)
    assert_equals_dense(attention, [text], [(0, 10)], 2)
    expected = torch.full_like(pool.tensor, 7.0)
    for position in range(10):
        block, offset = text.table[position // 4], position % 4
        expected[block, :, 0, :, offset] = text.k[:, position]
        expected[block, :, 1, :, offset] = text.v[:, position]
    assert torch.equal(pool.tensor, expected)


def test_bf16_pools():
    pool = make_pool(num_kv_heads=2, block_size=4, dtype="bfloat16")
    attention = TorchAttention(pool, (None, 5))
    texts = make_texts([9, 14], 2, 2, 4)
    for spans in ([(0, 8), (0, 11)], [(8, 9), (11, 14)]):
        attention.plan([Segment(e - s, e, t.table) for t, (s, e) in zip(texts, spans, strict=True)])
        for layer, window in enumerate((None, 5)):
            k = torch.cat([t.k[layer, s:e] for t, (s, e) in zip(texts, spans, strict=True)])
            v = torch.cat([t.v[layer, s:e] for t, (s, e) in zip(texts, spans, strict=True)])
            q = torch.ones((len(k), 4, HEAD_DIM), dtype=torch.bfloat16)
            out = attention.run(layer, q, k.bfloat16(), v.bfloat16())
            assert out.dtype == torch.bfloat16
            at = 0
            for text, (start, end) in zip(texts, spans, strict=True):
                n = end - start
                exact = dense(q[:n], text.k[layer, :end], text.v[layer, :end], window)
                torch.testing.assert_close(out[at : at + n].double(), exact, rtol=0, atol=0.05)
                at += n


def test_a_plan_serves_every_layer_and_is_replaced_by_the_next():
    pool = make_pool(num_kv_heads=1, block_size=4)
    attention = TorchAttention(pool, (None, None))
    texts = make_texts([6, 6], 2, 1, 4)
    assert_equals_dense(attention, texts[:1], [(0, 6)], 1)
    assert_equals_dense(attention, texts[1:], [(0, 6)], 1)


def test_windows_must_name_every_layer():
    with pytest.raises(AssertionError):
        TorchAttention(make_pool(num_kv_heads=1, block_size=4), (None,))


@pytest.mark.parametrize(("query_len", "context_len"), [(0, 3), (4, 3), (-1, 1)])
def test_a_segment_lies_within_its_context(query_len, context_len):
    with pytest.raises(AssertionError):
        Segment(query_len, context_len, [0])
