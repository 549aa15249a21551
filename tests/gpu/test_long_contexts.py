"""FlashInfer on a card beside torch's attention where contexts are split: longer than its least
chunk of 128 tokens, behind sliding windows on tensor cores, and in joined mixed steps; and a worker
that takes nearly the whole card. Skipped where there is no card.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.gpu.card import random_model
from engine.attention.base import AttentionBackend, Segment
from engine.attention.torch_attention import TorchAttention
from engine.checkpoint.model_config import ModelConfig
from engine.engine_config import EngineConfig
from engine.gpu.flashinfer_backend import FlashInferBackend
from engine.gpu.graphs import CudaCapture, DecodeGraphs
from engine.gpu.tuning import MixedStep
from engine.kv_pool import KvPool
from engine.loader import load_engine
from engine.models.decoder import DecoderModel
from scheduling.scheduler import SchedulerConfig
from tests.gpu.on_card import CARD, ON_CARD
from tests.gpu.test_card import BF16_LOGITS, BLOCK_SIZE, config_of, folder, forward
from tests.sequences import greedy, sequence_of

__all__ = ["folder"]  # a fixture

pytestmark = ON_CARD

NUM_BLOCKS = 512
_LEFT_BYTES = 5 << 29  # for CUDA, a step, graphs and the pool
PLAIN = ("LlamaForCausalLM", 4, None)  # groups of 2: decode on plain cores
TENSOR_CORES = ("LlamaForCausalLM", 16, None)
MISTRAL = ("MistralForCausalLM", 16, 256)  # a window, and decode on tensor cores


class Pair:
    """One model over two pools: FlashInfer's, and torch's for comparison."""

    def __init__(self, config: ModelConfig) -> None:
        torch.manual_seed(0)
        self.config = config
        self.backend = FlashInferBackend(config, CARD, torch.bfloat16, torch.bfloat16, 64)
        self.model: DecoderModel = random_model(config, self.backend)
        layout = config.kv_layout("test", BLOCK_SIZE, "bfloat16")
        self.pool, other = (KvPool(layout, NUM_BLOCKS, CARD) for _ in range(2))
        self.attention = self.backend.attention(self.pool)
        self.graphs = self._graphs()
        for pool in (self.pool, other):  # what lies beyond a context must never show
            pool.tensor.fill_(torch.nan)
        self._torch: AttentionBackend = TorchAttention(other, config.sliding_windows)

    def assert_as_torch(self, parts: list[tuple[int, int, list[int]]]) -> None:
        """A step gives torch's logits; a part is (tokens, first position, block table)."""
        ours = forward(self.model, self.attention, parts)
        expected = forward(self.model, self._torch, parts)
        torch.testing.assert_close(ours, expected, **BF16_LOGITS)

    def assert_graph_as_torch(self, parts: list[tuple[int, int, list[int]]]) -> None:
        """A captured step of decodes gives torch's logits."""
        expected = forward(self.model, self._torch, parts)
        segments = [Segment(1, start + 1, table) for _, start, table in parts]
        starts = [start for _, start, _ in parts]
        replayed = self.graphs.logits([5] * len(parts), starts, segments)
        torch.testing.assert_close(replayed, expected, **BF16_LOGITS)

    def _graphs(self) -> DecodeGraphs:
        make = self.backend.fixed_decodes(self.pool, 4, NUM_BLOCKS)
        return DecodeGraphs(self.model, make, [1, 2, 4], CudaCapture())


def tables(*lengths: int) -> list[list[int]]:
    """Block tables of contexts of these lengths, scattered over the pool."""
    free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(3)).tolist()
    found = []
    for length in lengths:
        count = -(-length // BLOCK_SIZE)
        found.append(free[:count])
        del free[:count]
    return found


@pytest.mark.parametrize("shape", [PLAIN, TENSOR_CORES, MISTRAL])
@pytest.mark.parametrize("length", [129, 600, 1000])
def test_contexts_beyond_the_least_chunk_give_torchs_logits(shape, length):
    """One long sequence alone is split over all multiprocessors."""
    pair = Pair(config_of(*shape))
    [table] = tables(length + 16)
    half = length // 2
    pair.assert_as_torch([(half, 0, table)])
    pair.assert_as_torch([(length - half, half, table)])  # a chunk behind a long prefix
    pair.assert_as_torch([(1, length, table)])
    pair.assert_graph_as_torch([(1, length + 1, table)])


@pytest.mark.parametrize("shape", [PLAIN, TENSOR_CORES, MISTRAL])
def test_decodes_of_very_different_lengths_give_torchs_logits(shape):
    pair = Pair(config_of(*shape))
    lengths = [3, 130, 700, 1000]
    found = tables(*(length + 16 for length in lengths))
    for length, table in zip(lengths, found, strict=True):
        pair.assert_as_torch([(length, 0, table)])
    decodes = [(1, length, table) for length, table in zip(lengths, found, strict=True)]
    pair.assert_as_torch(decodes)
    longer = [(1, length + 1, table) for _, length, table in decodes]
    pair.assert_graph_as_torch(longer)
    pair.assert_graph_as_torch(longer[1:])  # padded, and planned again for other lengths


@pytest.mark.parametrize("shape", [PLAIN, TENSOR_CORES, MISTRAL])
def test_a_joined_step_beyond_four_times_the_tuned_context_gives_torchs_logits(shape):
    """The choice of one call or two is made for a typical step; both must hold for any."""
    pair = Pair(config_of(*shape))
    tuned = pair.backend.tuned_for(pair.pool, MixedStep(2, 64, 64))
    lengths = [300, 1000]
    found = tables(*(length + 16 for length in lengths), 600)
    for attention in (tuned, pair.backend.attention(pair.pool)):
        pair.attention = attention
        for joins in (True, False):
            attention.joins_mixed = joins
            for length, table in zip(lengths, found, strict=False):
                pair.assert_as_torch([(length, 0, table)])
            decodes = [(1, length, table) for length, table in zip(lengths, found, strict=False)]
            pair.assert_as_torch([*decodes, (600, 0, found[-1])])


def test_a_worker_that_takes_nearly_the_whole_card_runs_its_largest_steps(folder: Path):
    """A prompt of the longest chunk beside a full batch, with 0.95 of the card, of which something
    else holds all but a little."""
    total = torch.cuda.get_device_properties(0).total_memory
    ballast = int(0.95 * total) - _LEFT_BYTES - torch.cuda.memory_reserved(0)
    held = torch.empty(ballast, dtype=torch.uint8, device=CARD)
    config = EngineConfig(
        folder,
        SchedulerConfig(BLOCK_SIZE, max_batch_size=256, chunk_max_tokens=2048, itl_target_s=99.0),
        dtype="bfloat16",
        device="cuda:0",
        memory_fraction=0.95,
        attention="kernel",
    )
    engine = load_engine(config, lambda: 0.0).engine
    engine.warm_up()
    for number in range(256):
        prompt = (7 + (number + i) % 300 for i in range(40))
        engine.scheduler.add(
            sequence_of(prompt, greedy(24), BLOCK_SIZE, request_id=f"short {number}")
        )
    engine.scheduler.add(sequence_of((9 + i % 300 for i in range(4000)), greedy(2), BLOCK_SIZE))
    while engine.scheduler.has_work or engine.is_ahead:
        engine.run(engine.plan())
    assert engine.scheduler.blocks.num_pinned == 0
    assert held.numel() < torch.cuda.memory_reserved(0)
    assert torch.cuda.memory_reserved(0) <= 0.95 * total
