"""The parts of bench.gpu in order, with the shapes and sizes that they measure.

Each part prepares its checks and yields their rows. A package that only one part needs is imported
by this part, so that the others run without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from bench.gpu.card import (
    BLOCK_SIZE,
    Card,
    Passes,
    Row,
    check_decode,
    check_graphs,
    check_overhead,
    check_prefill,
    describe_machine,
    measure_card,
    random_model,
)
from bench.gpu.rank_parts import cards, exchange, exchange_cards, ranks
from bench.tools.checkpoints import benchmark_checkpoint, served_checkpoint
from bench.tools.paths import DEMO_MODEL
from checkpoint.json_keys import JsonKeys
from engine.checkpoint.config import load_model_config, parse_model_config
from engine.checkpoint.model_config import ModelConfig
from engine.device import available_bytes, kv_torch_dtype
from engine.gpu.flashinfer_backend import FlashInferBackend
from engine.gpu.graphs import CudaCapture, DecodeGraphs
from engine.gpu.invariant_backend import InvariantBackend
from engine.kv_pool import KvPool
from engine.models.decoder import DecoderModel
from protocol.layout import FP8

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128_256,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "dtype": "bfloat16",
    "eos_token_id": 2,
}
DECODE_BATCHES = (1, 8, 32, 128, 256)
GRAPH_BATCHES = (1, 32)
CONTEXTS = (1024, 8192)
CHUNKS = (512, 2048, 8192)
PROMPTS = (512, 2048)
_POOL_BYTES = 96 << 30  # 128 sequences of 8,192 tokens would take 128 GiB; use at most this much
_ROOM_BYTES = 4 << 30  # for steps and graphs beside the pool
_MIXED_BLOCKS = 20_000  # more than any of its steps reads
_BF16 = "bfloat16"

Part = Callable[[torch.device], Iterator[Row]]


def limits(device: torch.device) -> Iterator[Row]:
    """The machine's software, and the card's limits."""
    yield from describe_machine(device)
    card = measure_card(device)
    yield Row("limits", "copy", card.copy_bytes_per_s / 1e12, "TB/s", note="read and written")
    yield Row("limits", "bf16 product", card.flops_per_s / 1e12, "TFLOP/s")


def build(device: torch.device) -> Iterator[Row]:
    """Build the kernels of the 8B shape by running first steps."""
    yield _built(device, "8B", _llama(num_layers=1), _BF16)


def build_small(device: torch.device) -> Iterator[Row]:
    """Build the kernels of M1 and M3; M2 shares them."""
    for name in ("M1", "M3"):
        yield _built(device, name, load_model_config(benchmark_checkpoint(name)), _BF16)


def build_fp8(device: torch.device) -> Iterator[Row]:
    """Build the kernels for KV in fp8, for heads of 128 and of 64."""
    yield _built(device, "8B, KV in fp8", _llama(num_layers=1), FP8)
    yield _built(device, "M1, KV in fp8", load_model_config(benchmark_checkpoint("M1")), FP8)


def exactness(device: torch.device) -> Iterator[Row]:
    """Tokens of small checkpoints."""
    from bench.gpu.models import check_exactness

    for name in ("M1", "M3"):
        yield from check_exactness(Card.unmeasured(device), benchmark_checkpoint(name), name)


def logits(device: torch.device) -> Iterator[Row]:
    """Logits of small checkpoints."""
    from bench.gpu.models import check_logits

    for name in ("M1", "M3"):
        yield from check_logits(Card.unmeasured(device), benchmark_checkpoint(name), name)


def mixed(device: torch.device) -> Iterator[Row]:
    """Time attention of decodes beside a chunk in one call and in two, and of chunks with fa3 and
    fa2."""
    from bench.gpu.steps import MIXED_STEPS, check_kernels, check_mixed

    config = _llama(num_layers=4)
    backend = FlashInferBackend(config, device, torch.bfloat16, torch.bfloat16)
    pool = KvPool(config.kv_layout("bench", BLOCK_SIZE, _BF16), _MIXED_BLOCKS, device)
    _fill(pool)
    attention, layers = backend.over(pool), backend.layers(pool)
    yield from check_mixed(attention, layers, MIXED_STEPS)
    if backend.choice.prefill == "fa3":
        other = backend.over(pool, replace(backend.choice, prefill="fa2"))
        yield from check_kernels(attention, other, layers)


def decode(device: torch.device) -> Iterator[Row]:
    """Decode of the 8B shape, and its host's overhead."""
    card = measure_card(device)
    config = _llama()
    num_blocks = _POOL_BYTES // config.kv_layout("bench", BLOCK_SIZE, _BF16).block_bytes
    torch.cuda.empty_cache()
    passes = _passes(config, device, num_blocks, list(DECODE_BATCHES))
    for context in CONTEXTS:
        for batch in DECODE_BATCHES:
            yield check_decode(card, passes, batch, context)
    yield check_overhead(card, passes)
    for batch in GRAPH_BATCHES:
        yield check_graphs(card, passes, batch, CONTEXTS[0])


def ahead(device: torch.device) -> Iterator[Row]:
    """Time engine steps on the 8B shape, waiting for each and running one ahead. Writes traces to
    the current folder."""
    from bench.gpu.steps import Decodes, Prefills, check_ahead, check_prefill_ahead

    load = Decodes()
    num_blocks = 2 * load.batch * load.context // BLOCK_SIZE
    passes = _passes(_llama(), device, num_blocks, [load.batch])
    card = Card.unmeasured(device)
    yield from check_ahead(card, passes, load, Path())
    for length in PROMPTS:
        yield from check_prefill_ahead(card, passes, Prefills(length), Path())


def prefill(device: torch.device) -> Iterator[Row]:
    """Prefill of the 8B shape."""
    card = measure_card(device)
    torch.cuda.empty_cache()
    passes = _passes(_llama(), device, max(CHUNKS) // BLOCK_SIZE, [1])
    for chunk in CHUNKS:
        yield check_prefill(card, passes, chunk)


def overlap(device: torch.device) -> Iterator[Row]:
    """A chunk's blocks are copied while the next chunk is computed."""
    from bench.gpu.steps import check_overlap

    passes = _passes(_llama(), device, 2 * max(CHUNKS) // BLOCK_SIZE, [1])
    for chunk in CHUNKS:
        yield from check_overlap(Card.unmeasured(device), passes, chunk)


def tiers(device: torch.device) -> Iterator[Row]:
    """A chunk's blocks go to pinned host memory and back, alone and beside other chunks."""
    from bench.gpu.tiers import check_tiers

    passes = _passes(_llama(), device, 2 * max(CHUNKS) // BLOCK_SIZE, [1])
    yield from check_tiers(Card.unmeasured(device), passes, max(CHUNKS))


def fp8(device: torch.device) -> Iterator[Row]:
    """Cost and gain of weights and KV in fp8."""
    from bench.gpu.numerics import check_accuracy, check_error, check_fast_accum, check_gain

    yield from check_accuracy(DEMO_MODEL)
    card = Card.unmeasured(device)
    for name in ("M1", "M3"):
        yield from check_error(card, benchmark_checkpoint(name), name)
    plain, narrow = (
        _passes(_llama(), device, 3 * max(CHUNKS) // BLOCK_SIZE, [1, 32], bits, kv_dtype)
        for bits, kv_dtype in ((16, _BF16), (8, FP8))
    )
    yield from check_gain(card, plain, narrow)
    yield from check_fast_accum(card)


def invariant(device: torch.device) -> Iterator[Row]:
    """The batch-invariant mode: bits of a text in different steps, and the mode's cost."""
    from bench.gpu.numerics import DECODES, Bits, check_bits, check_cost

    card, bits, sizes = Card.unmeasured(device), Bits(), list(DECODES)
    in_mode = _invariant_passes(_llama(), device, bits.num_blocks, sizes)
    yield from check_bits(card, in_mode, bits)
    plain = _passes(_llama(), device, bits.num_blocks, sizes)
    yield from check_cost(card, plain, in_mode)


def latents(device: torch.device) -> Iterator[Row]:
    """Latent attention: its error, and a layer's times."""
    from bench.gpu.latents import LatentLoad, check_latents

    yield from check_latents(device, LatentLoad())


def memory(device: torch.device) -> Iterator[Row]:
    """The memory that an engine takes, compared with its fraction of the card."""
    from bench.gpu.card import check_memory

    yield from check_memory(Card.unmeasured(device), benchmark_checkpoint("M2"), 0.45)


def peer(device: torch.device) -> Iterator[Row]:
    """Throughput compared with transformers'."""
    from bench.gpu.models import Load, check_throughput

    card = Card.unmeasured(device)
    yield from check_throughput(card, benchmark_checkpoint("M2"), "M2", Load())


def split(device: torch.device) -> Iterator[Row]:
    """Prefill and decode as two processes on this card."""
    from bench.gpu.fleets import SplitLoad, check_split

    card = measure_card(device)
    torch.cuda.empty_cache()
    yield from check_split(card, served_checkpoint("M3"), SplitLoad())


def interference(device: torch.device) -> Iterator[Row]:
    """Effect of long prompts on streams: whole, chunked, apart."""
    from bench.gpu.fleets import FleetLoad, check_interference

    yield from check_interference(str(device), served_checkpoint("M2"), FleetLoad())


def share(device: torch.device) -> Iterator[Row]:
    """Effect of MPS, and of parts of the multiprocessors, on decode beside prefill."""
    from bench.gpu.fleets import FleetLoad, check_share

    yield from check_share(str(device), served_checkpoint("M2"), FleetLoad())


PARTS: dict[str, Part] = {
    "limits": limits,
    "build": build,
    "build-small": build_small,
    "exactness": exactness,
    "logits": logits,
    "mixed": mixed,
    "decode": decode,
    "ahead": ahead,
    "prefill": prefill,
    "overlap": overlap,
    "tiers": tiers,
    "build-fp8": build_fp8,
    "fp8": fp8,
    "invariant": invariant,
    "latents": latents,
    "memory": memory,
    "peer": peer,
    "split": split,
    "interference": interference,
    "share": share,
    "ranks": ranks,
    "exchange": exchange,
    "cards": cards,
    "exchange-cards": exchange_cards,
}


def _llama(num_layers: int = 32) -> ModelConfig:
    keys = LLAMA_8B | {"num_hidden_layers": num_layers}
    return parse_model_config(JsonKeys(keys, "bench.gpu"))


def _built(device: torch.device, name: str, config: ModelConfig, kv_dtype: str) -> Row:
    """Run a first chunk and a first decode of this shape, which builds their kernels."""
    started = time.monotonic()
    passes = _passes(config, device, 64, [1], kv_dtype=kv_dtype)
    check_prefill(Card.unmeasured(device), passes, 64)
    return Row("build", f"{name}: kernels, and a first step", time.monotonic() - started, "s")


def _passes(
    config: ModelConfig,
    device: torch.device,
    num_blocks: int,
    sizes: list[int],
    bits: int = 16,
    kv_dtype: str = _BF16,
) -> Passes:
    """The shape with FlashInfer and graphs. Raises FlashInferUnavailable."""
    backend = FlashInferBackend(
        config,
        device,
        torch.bfloat16,
        kv_torch_dtype(kv_dtype),
        max(sizes),
        weight_bits=bits,
    )
    model = random_model(config, backend)
    return _passes_by(backend, model, num_blocks, sizes, kv_dtype)


def _invariant_passes(
    config: ModelConfig, device: torch.device, num_blocks: int, sizes: list[int]
) -> Passes:
    """The shape in batch-invariant mode, with graphs. Raises ConfigError."""
    backend = InvariantBackend(config, device, torch.bfloat16)
    model = random_model(config, backend)
    return _passes_by(backend, model, num_blocks, sizes, _BF16)


def _passes_by(
    backend: FlashInferBackend | InvariantBackend,
    model: DecoderModel,
    num_blocks: int,
    sizes: list[int],
    kv_dtype: str,
) -> Passes:
    device, layout = model.device, model.config.kv_layout("bench", BLOCK_SIZE, kv_dtype)
    room = available_bytes(device) - (_ROOM_BYTES if device.type == "cuda" else 0)
    pool = KvPool(layout, fitting_blocks(num_blocks, layout.block_bytes, room), device)
    _fill(pool)
    most_blocks = max(sizes) * max(CONTEXTS) // BLOCK_SIZE
    make_attention = backend.fixed_decodes(pool, max(sizes), most_blocks)
    graphs = DecodeGraphs(model, make_attention, sizes, CudaCapture())
    return Passes(model, pool, backend.attention(pool), graphs.logits, graphs)


def fitting_blocks(num_blocks: int, block_bytes: int, room: int) -> int:
    """As many of `num_blocks` as fit into `room` bytes, but at least one, so that its allocation
    raises with the shortage."""
    return max(1, min(num_blocks, room // block_bytes))


def _fill(pool: KvPool) -> None:
    """Fill the pool with random numbers, even if torch has none of its dtype."""
    if pool.tensor.dtype.itemsize > 1:
        pool.tensor.normal_()
        return
    for block in pool.tensor:
        block.copy_(torch.randn(block.shape, device=pool.device))
