"""Latent attention against attention to keys and values written out, over hostile pools."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.attention.base import Segment
from engine.attention.cpu_latents import KernelLatentAttention
from engine.attention.latents import UpProjection
from engine.attention.torch_latents import TorchLatentAttention
from engine.checkpoint.latent_config import LatentConfig
from engine.kv_pool import KvPool
from protocol.layout import KvLayout
from tests.effort import times

CONFIG = LatentConfig(
    q_lora_rank=None,
    kv_lora_rank=12,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=5,
    softmax_scale=0.3,
)
NUM_BLOCKS, NUM_LAYERS, BLOCK_SIZE = 200, 2, 4


def make_pool(
    dtype: str = "float32", config: LatentConfig = CONFIG, num_blocks: int = NUM_BLOCKS
) -> KvPool:
    layout = KvLayout(
        model_fingerprint="x",
        dtype=dtype,
        num_layers=NUM_LAYERS,
        num_planes=1,
        num_kv_heads=1,
        block_size=BLOCK_SIZE,
        head_dim=config.latent_dim,
    )
    pool = KvPool(layout, num_blocks)
    pool.tensor.fill_(torch.nan)
    return pool


def up_projection(weight: torch.Tensor, config: LatentConfig) -> UpProjection:
    rows = weight.flatten(0, 1)
    return UpProjection(
        weight, config.qk_nope_head_dim, lambda x: torch.nn.functional.linear(x, rows)
    )


def dense(q: torch.Tensor, latents: torch.Tensor, up: UpProjection) -> torch.Tensor:
    """Attention of the last len(q) positions to all latents, in float64."""
    heads = torch.einsum("hdr,kr->hkd", up.weight.double(), latents[:, : up.rank].double())
    rotated = latents[None, :, up.rank :].double().expand(len(heads), -1, -1)
    keys = torch.cat((heads[:, :, : up.key_dim], rotated), dim=2)
    scores = torch.einsum("qhd,hkd->hqk", q.double(), keys) * CONFIG.softmax_scale
    first = len(latents) - len(q)
    later = torch.arange(len(latents)) > torch.arange(first, len(latents))[:, None]
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum("hqk,hkd->qhd", weights, heads[:, :, up.key_dim :])


texts = st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=4)


@settings(max_examples=times(12, 400), deadline=None, derandomize=True)
@given(texts, st.sampled_from([1, 3]), st.sampled_from([0, 5, 1000]), st.sampled_from([4, 12, 512]))
@example([(15, 1), (27, 1)], 1, 1000, 4)  # decoded together: one sees no key of the last pieces
def test_it_equals_attention_written_out(texts, num_heads, most_absorbed, piece_tokens):
    """Whatever is absorbed, and however contexts and queries are cut."""
    chance = torch.Generator().manual_seed(len(texts))
    pool = make_pool()
    attention = TorchLatentAttention(pool, CONFIG, piece_tokens, 100, most_absorbed)
    attention._has_flash = len(texts) % 2 == 0  # a card has not
    free = torch.randperm(NUM_BLOCKS, generator=chance).tolist()
    tables = [[free.pop() for _ in range(-(-sum(text) // BLOCK_SIZE))] for text in texts]
    rows = CONFIG.qk_nope_head_dim + CONFIG.v_head_dim
    weight = torch.randn(num_heads, rows, CONFIG.kv_lora_rank, generator=chance)
    up = up_projection(weight, CONFIG)
    for layer in range(NUM_LAYERS):
        latents = [torch.randn(sum(text), CONFIG.latent_dim, generator=chance) for text in texts]
        size = (num_heads, CONFIG.qk_head_dim)
        queries = [torch.randn(now, *size, generator=chance) for _, now in texts]
        before = [(i, text[0]) for i, text in enumerate(texts) if text[0]]
        if before:
            attention.plan([Segment(length, length, tables[i]) for i, length in before])
            num_tokens = sum(length for _, length in before)
            stored = torch.cat([latents[i][:length] for i, length in before])
            attention.run_latents(layer, torch.zeros(num_tokens, *size), stored, up)
        segments = [
            Segment(now, length + now, table)
            for (length, now), table in zip(texts, tables, strict=True)
        ]
        attention.plan(segments)
        now = torch.cat([each[length:] for each, (length, _) in zip(latents, texts, strict=True)])
        found = attention.run_latents(layer, torch.cat(queries), now, up)
        expected = [dense(q, each, up) for q, each in zip(queries, latents, strict=True)]
        torch.testing.assert_close(found.double(), torch.cat(expected), atol=1e-4, rtol=1e-4)
    used = {block for table in tables for block in table}
    others = [block for block in range(NUM_BLOCKS) if block not in used]
    assert pool.tensor[others].isnan().all()


DEEPSEEK = LatentConfig(1536, 512, 128, 64, 128, 0.1)


@pytest.mark.parametrize(
    ("num_heads", "dtype", "error"),
    [(16, "float32", 1e-4), (16, "bfloat16", 0.02), (128, "bfloat16", 0.02), (1, "bfloat16", 0.02)],
)
def test_the_kernel_equals_torch(product_kernels, num_heads, dtype, error):
    """With DeepSeek's sizes: decodes of one piece and of several, and a chunk, beside a chunk that
    torch computes."""
    chance = torch.Generator().manual_seed(num_heads)
    computed = getattr(torch, dtype)
    texts = [(0, 1), (299, 1), (700, 1), (40, 5), (3, 180)]
    free = torch.randperm(400, generator=chance).tolist()
    tables = [[free.pop() for _ in range(-(-sum(text) // BLOCK_SIZE))] for text in texts]
    segments = [
        Segment(now, before + now, table)
        for (before, now), table in zip(texts, tables, strict=True)
    ]
    num_tokens = sum(now for _, now in texts)
    q = torch.randn(num_tokens, num_heads, 192, generator=chance).to(computed)
    latents = torch.randn(num_tokens, 576, generator=chance).to(computed)
    weight = torch.randn(num_heads, 256, 512, generator=chance) * 512**-0.5
    up = up_projection(weight.to(computed), DEEPSEEK)
    stored = torch.randn(400, NUM_LAYERS, 1, 1, BLOCK_SIZE, 576, generator=chance)
    stored[free] = torch.nan
    for table, (before, now) in zip(tables, texts, strict=True):
        stored[table[-1], ..., (before + now - 1) % BLOCK_SIZE + 1 :, :] = torch.nan
    results, pools = [], []
    for make in (
        lambda pool: TorchLatentAttention(pool, DEEPSEEK),
        lambda pool: KernelLatentAttention(pool, DEEPSEEK, num_heads, product_kernels),
    ):
        pool = make_pool(dtype, DEEPSEEK, 400)
        pool.tensor.copy_(stored)
        attention = make(pool)
        attention.plan(segments)
        results.append(attention.run_latents(1, q, latents, up).float())
        pools.append(pool.tensor)
    torch.testing.assert_close(results[1], results[0], atol=error, rtol=error)
    assert torch.equal(pools[0].nan_to_num(), pools[1].nan_to_num())


@pytest.mark.parametrize("most_absorbed", [0, 1000])
def test_memory_does_not_grow_with_the_context(most_absorbed):
    """No tensor of a pass over a long context has more numbers than a slice of its scores."""
    pool, limit = make_pool(), 1024
    attention = TorchLatentAttention(pool, CONFIG, 16, limit, most_absorbed)
    weight = torch.randn(2, CONFIG.qk_nope_head_dim + CONFIG.v_head_dim, CONFIG.kv_lora_rank)
    up = up_projection(weight, CONFIG)
    attention.plan([Segment(8, 8 + 90 * BLOCK_SIZE, range(100))])
    pool.tensor.zero_()
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            found = function(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor) and found.data_ptr() not in shared:
                largest = max(largest, found.numel())
            return found

    shared = {pool.tensor.data_ptr()}
    with Sizes():
        attention.run_latents(0, torch.randn(8, 2, 10), torch.randn(8, 16), up)
    assert 0 < largest <= limit


def test_few_queries_are_absorbed_where_that_is_less_arithmetic():
    deepseek = LatentConfig(1536, 512, 128, 64, 128, 1.0)
    assert 170 < deepseek.most_absorbed < 171
    n, context = 170, 4096
    expanded = 2 * context * (512 * 256 + n * (192 + 128))
    absorbed = 2 * context * n * (512 + 64 + 512)
    assert absorbed < expanded < absorbed + 2 * context * (1088 - 320)
    assert LatentConfig(None, 10, 16, 4, 16, 1.0).most_absorbed == float("inf")
