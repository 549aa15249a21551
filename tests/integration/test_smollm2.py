"""A real model from its GGUF file: transformers' answers in fp32, and its quantized weights."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import psutil
import pytest
import torch
from gguf.quants import dequantize

from bench.accuracy import Kind, compare, held_text
from bench.tools.gguf_conversion import in_pairs
from checkpoint.model_source import resolve_model
from engine.attention.base import Segment
from engine.attention.torch_attention import TorchAttention
from engine.checkpoint.config import load_model_config
from engine.checkpoint.quantized_blocks import BlockMatrix
from engine.checkpoint.weights import load_block_weights, load_weights
from engine.cpu.backend import CpuBackend
from engine.cpu.block_panels import BlockPanels
from engine.cpu.huge_pages import HugePages
from engine.engine import Engine
from engine.engine_config import EngineConfig
from engine.kv_pool import KvPool
from engine.loader import load_engine
from engine.models.decoder import DecoderModel
from engine.native.library import load_library
from scheduling.scheduler import SchedulerConfig
from tests.effort import times
from tests.gguf_files import smollm2
from tests.integration.fleets import complete, running_fleet
from tests.integration.reference import Reference
from tests.integration.smollm2_reference import (
    END,
    NUM_TOKENS,
    generate,
    load_references,
    transformers_model,
)
from tests.sequences import greedy, sequence_of

BLOCK = 16
NUM_PROMPTS = times(5, 40)
NUM_WHOLE_ANSWERS = times(1, 40)
NUM_FIRST = 4
"""Tokens by which answers of blocks are told apart from others."""
MEMORY_SHARE = 1.3
NUM_PERPLEXITY_TOKENS = 2048


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model(smollm2())


def load(folder: Path, **fields: object) -> Engine:
    scheduler = SchedulerConfig(
        block_size=BLOCK, max_batch_size=4, chunk_min_tokens=16, chunk_max_tokens=64
    )
    config = EngineConfig(folder, scheduler, device="cpu", num_blocks=64, **fields)
    return load_engine(config, time.monotonic).engine


def answer(engine: Engine, reference: Reference, num_tokens: int = NUM_TOKENS) -> tuple[int, ...]:
    params = greedy(num_tokens, stop_token_ids=(END,))
    sequence = sequence_of(reference.prompt, params, BLOCK)
    engine.scheduler.add(sequence)
    while engine.scheduler.has_work:
        engine.run(engine.plan())
    return tuple(sequence.tokens[len(reference.prompt) :])


def test_answers_are_transformers_in_fp32(folder):
    engine = load(folder, dtype="float32", attention="torch")
    for reference in load_references()[:NUM_WHOLE_ANSWERS]:
        assert answer(engine, reference) == reference.output


@pytest.fixture(scope="module")
def of_blocks(folder: Path) -> Engine:
    """Multiplies the file's quantized weights as they are."""
    return load(folder)


def test_blocks_give_sensible_answers_and_few_others(of_blocks):
    """Activations in bf16 decide some near ties otherwise."""
    references = load_references()[:NUM_PROMPTS]
    first = [answer(of_blocks, each, NUM_FIRST) == each.output[:NUM_FIRST] for each in references]
    assert sum(first) >= 0.8 * len(references)


@pytest.mark.nightly
def test_packed_blocks_hold_the_values_of_the_gguf_package(folder):
    """Of the whole file."""
    config, kernels = load_model_config(folder), load_library()
    weights = load_block_weights(folder, config, torch.bfloat16)
    values = {
        tensor.name: torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
        for tensor in gguf.GGUFReader(smollm2()).tensors
        if tensor.data.ndim > 1
    }

    def packed(matrix: BlockMatrix) -> torch.Tensor:
        return BlockPanels(matrix, kernels, HugePages()).values()

    assert torch.equal(packed(weights.embed), values.pop("token_embd.weight"))
    for index, layer in enumerate(weights.layers):
        q, k, v, o, gate, up, down = (
            values.pop(f"blk.{index}.{name}.weight")
            for name in (
                "attn_q",
                "attn_k",
                "attn_v",
                "attn_output",
                "ffn_gate",
                "ffn_up",
                "ffn_down",
            )
        )
        queries, keys, rest = packed(layer.attention.matrices["qkv"]).split(
            [len(q), len(k), len(v)]
        )
        assert np.array_equal(in_pairs(queries.numpy(), config.num_heads), q)
        assert np.array_equal(in_pairs(keys.numpy(), config.num_kv_heads), k)
        assert torch.equal(rest, v)
        assert torch.equal(packed(layer.attention.matrices["o"]), o)
        assert torch.equal(packed(layer.feed_forward.matrices["gate_up"]), torch.cat([gate, up]))
        assert torch.equal(packed(layer.feed_forward.matrices["down"]), down)
    assert not values


def test_memory_grows_by_little_more_than_the_file(folder, of_blocks):
    """By a second engine: with the first, modules and kernels are loaded."""
    process = psutil.Process()
    before = process.memory_full_info()
    engine = load(folder)
    after = process.memory_full_info()
    kv_bytes = 64 * engine.layout.block_bytes
    grown = (after.rss - after.shared) - (before.rss - before.shared)
    assert grown <= MEMORY_SHARE * smollm2().stat().st_size + kv_bytes


@pytest.mark.nightly
def test_transformers_answers_what_the_file_holds():
    model = transformers_model(smollm2())
    for reference in load_references():
        output, _ = generate(model, reference.prompt)
        assert tuple(output) == reference.output


@pytest.mark.nightly
def test_logits_are_transformers(folder):
    model, config = transformers_model(smollm2()), load_model_config(folder)
    ours = DecoderModel(
        config, load_weights(folder, config, dtype=torch.float32), CpuBackend(config, "float32")
    )
    pool = KvPool(config.kv_layout("smollm2", BLOCK, "float32"), 8)
    attention = TorchAttention(pool, config.sliding_windows)
    for reference in load_references():
        tokens = torch.tensor(reference.prompt)
        with torch.no_grad():
            theirs = model(tokens[None]).logits[0]
        attention.plan([Segment(len(tokens), len(tokens), list(range(8)))])
        logits = ours.forward(tokens, torch.arange(len(tokens)), attention)
        assert (logits - theirs).abs().max() < 1e-3
        top = theirs.topk(2, dim=-1).values
        is_clear = top[:, 0] - top[:, 1] > 2e-3
        assert torch.equal(logits.argmax(-1)[is_clear], theirs.argmax(-1)[is_clear])


@pytest.mark.nightly
def test_blocks_cost_no_accuracy(folder):
    """Over the same weights, dequantized and rounded to bf16."""
    blocks, rounded = compare(
        folder, [Kind("auto"), Kind("exact16")], held_text(), NUM_PERPLEXITY_TOKENS
    ).values()
    assert blocks.bits_per_weight < 6 < rounded.bits_per_weight
    assert math.exp((blocks.loss - rounded.loss) / blocks.tokens) == pytest.approx(1, abs=0.002)


@pytest.mark.nightly
def test_a_split_fleet_answers_the_same(folder) -> None:
    with running_fleet(
        model=str(folder),
        served_model_name="smollm2",
        transport="nixl",
        local_prefill_threshold_tokens=0,
    ) as fleet:
        for reference in load_references():
            fields = {"model": "smollm2", "max_tokens": len(reference.output)}
            found = complete(fleet, list(reference.prompt), **fields)
            assert tuple(found["choices"][0]["token_ids"]) == reference.output


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
