"""Decode through captured passes: padding, buffers and plans, with a capture that needs no card."""

from __future__ import annotations

import pytest
import torch

from engine.attention.base import Segment
from engine.attention.flashinfer_attention import FlashInferChoice
from engine.attention.flashinfer_graph import DecodeBuffers, FixedDecode
from engine.gpu.graphs import GRAPH_BYTES, DecodeGraphs, graph_sizes
from engine.gpu.memory import CONTEXT_BYTES, NO_GRAPHS, CardMemory, Graphs, blocks_for_card
from engine.sampling.chosen_tokens import LateTokens
from protocol.errors import ConfigError
from protocol.layout import KvLayout
from tests.unit.engine.attention import fake_flashinfer
from tests.unit.engine.attention.torch_pool_layers import TorchPoolLayers

GIB = 1 << 30


def record(run):
    """Like a capture: the same pass again."""
    run()
    return run


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_replays_give_the_logits_of_eager_steps(make_tiny, paged_model, text, architecture):
    tiny = make_tiny(architecture)
    eager, captured = paged_model(tiny.folder), paged_model(tiny.folder)
    config = eager.config
    layers = TorchPoolLayers(captured.pool, config.sliding_windows, config.num_heads, torch.float32)
    workspace = torch.empty(16, dtype=torch.uint8)
    choice = FlashInferChoice("fa2", decode_on_tensor_cores=True)
    buffers = DecodeBuffers(4, 64, captured.pool.device)
    graphs = DecodeGraphs(
        captured.model,
        lambda size: FixedDecode(layers, size, buffers, workspace, choice, fake_flashinfer),
        [1, 2, 4],
        record,
    )
    assert graphs.max_sequences == 4
    captured.pool.tensor.fill_(torch.nan)  # as it was before the captures wrote to block 0
    words = text(40)
    tables = [[3, 9, 5], [7, 1, 8], [11, 2, 4]]
    lengths = [5, 8, 1]
    places = set()
    for model in (eager, captured):
        for table, length in zip(tables, lengths, strict=True):
            model.step([(words[:length], 0, table)])
    for step, batch in enumerate(([0, 1, 2], [2, 0], [1], [0, 1, 2])):
        parts = [([words[20 + step + i]], lengths[i], tables[i]) for i in batch]
        expected = eager.step(parts)
        segments = [Segment(1, position + 1, table) for _, position, table in parts]
        positions = [position for _, position, _ in parts]
        inputs = [tokens[0] for tokens, _, _ in parts]
        late = None
        if step % 2:  # the last one is known to the device only
            chosen = torch.tensor([17, inputs[-1]])
            late = LateTokens.of([len(inputs) - 1], [1], chosen)
            inputs[-1] = 0
        logits = graphs.logits(inputs, positions, segments, late)
        places.add(logits.data_ptr())
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
        for i in batch:
            lengths[i] += 1
    assert len(places) == 1, "every graph leaves its logits in one tensor"


@pytest.mark.parametrize("largest", [1, 2, 3, 7, 64, 100, 256, 300])
def test_graph_sizes_rise_to_the_largest_batch(largest):
    sizes = graph_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    for batch in range(1, largest + 1):
        size = min(size for size in sizes if size >= batch)
        assert size - batch < max(batch, 8), f"{batch} is padded to {size}"


def card(**changed: int) -> CardMemory:
    parts = {"total": 100 * GIB, "free": 90 * GIB, "held": 10 * GIB, "step": GIB, "graphs": GIB}
    return CardMemory(**(parts | changed))


def test_the_pool_gets_what_the_profile_leaves_of_the_fraction():
    assert card().for_pool(0.5) == 50 * GIB - 12 * GIB - CONTEXT_BYTES
    assert card().for_pool(1.0) == 88 * GIB - CONTEXT_BYTES
    assert card(free=5 * GIB).for_pool(0.5) == 3 * GIB  # another process holds the rest
    assert card().for_pool(0.1) == 0


def test_graphs_are_counted_with_what_each_has_of_its_own():
    assert NO_GRAPHS.num_bytes(GIB) == 0
    one, two = Graphs(20, 1).num_bytes(GIB), Graphs(20, 2).num_bytes(GIB)
    assert one - 20 * (GRAPH_BYTES + (8 << 20)) - GIB == 32 << 20
    assert two - one == 20 * (8 << 20)  # a wrapper for each window


def test_a_card_without_room_for_a_block_is_said():
    layout = KvLayout(
        model_fingerprint="x",
        dtype="bfloat16",
        num_layers=32,
        num_kv_heads=8,
        block_size=16,
        head_dim=128,
    )
    assert blocks_for_card(layout, card(), 0.5) == card().for_pool(0.5) // layout.block_bytes
    with pytest.raises(ConfigError, match="hold no KV block"):
        blocks_for_card(layout, card(), 0.1)
