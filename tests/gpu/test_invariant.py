"""The batch-invariant mode on a card: logits like those of torch's attention, and the same bits in
every step. Skipped where there is no card."""

from __future__ import annotations

import pytest
import torch

from bench.gpu.card import Card, Passes, random_model
from bench.gpu.numerics import Bits, check_bits
from engine.attention.torch_attention import TorchAttention
from engine.gpu.graphs import CudaCapture, DecodeGraphs
from engine.gpu.invariant_backend import InvariantBackend
from engine.kv_pool import KvPool
from tests.gpu.on_card import CARD, ON_CARD
from tests.gpu.test_card import BF16_LOGITS, BLOCK_SIZE, config_of, forward

pytestmark = ON_CARD

BITS = Bits(length=700, num_compared=30, chunks=(7, 64), batches=(1, 6))


@pytest.mark.parametrize(
    ("architecture", "num_heads", "window"),
    [
        ("LlamaForCausalLM", 4, None),
        ("Qwen3ForCausalLM", 14, None),  # groups of 7, and norms of q and k
        ("MistralForCausalLM", 16, 100),
    ],
)
def test_logits_are_torchs_and_their_bits_the_same_in_every_step(architecture, num_heads, window):
    config = config_of(architecture, num_heads, window)
    torch.manual_seed(0)
    backend = InvariantBackend(config, CARD, torch.bfloat16)
    model = random_model(config, backend)
    layout = config.kv_layout("test", BLOCK_SIZE, "bfloat16")
    pool, other = (KvPool(layout, BITS.num_blocks, CARD) for _ in range(2))
    make = backend.fixed_decodes(pool, 6, BITS.num_blocks)
    graphs = DecodeGraphs(model, make, [1, 6], CudaCapture())
    attention = backend.attention(pool)
    table = list(range(50))
    for each in (pool, other):
        each.tensor.fill_(torch.nan)  # what lies beyond a context must never show
    for parts in ([(650, 0, table)], [(1, 650, table), (40, 0, list(range(60, 70)))]):
        expected = forward(model, TorchAttention(other, config.sliding_windows), parts)
        torch.testing.assert_close(forward(model, attention, parts), expected, **BF16_LOGITS)
    pool.tensor.normal_()
    passes = Passes(model, pool, attention, graphs.logits, graphs)
    rows = list(check_bits(Card(CARD, 1.0, 1.0), passes, BITS))
    assert {row.name: row.value for row in rows if row.value} == {}
