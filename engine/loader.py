"""Builds a runnable engine from a checkpoint's folder.

Reads the configuration, sizes the KV pool, loads the weights, and wires scheduler, runner,
attention and sampler. Errors in the checkpoint or the settings are raised before anything large is
loaded.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from engine.attention.base import AttentionBackend
from engine.attention.cpu_backend import KernelAttention, orders_for, supports
from engine.attention.flashinfer_backend import FlashInferUnavailable
from engine.attention.torch_backend import TorchAttention
from engine.batch_invariance import check_card_settings, check_cpu_kernels
from engine.checkpoint.config import ModelConfig, load_model_config
from engine.checkpoint.files import model_fingerprint
from engine.checkpoint.stored_tensors import OpenTensors
from engine.checkpoint.weights import (
    Progress,
    has_blocks,
    load_block_weights,
    load_weights,
)
from engine.device import kv_torch_dtype, torch_dtype
from engine.engine import Engine, EngineLimits
from engine.gpu.backend import CardBackend
from engine.gpu.fp8_format import MIN_CAPABILITY, needs_capability
from engine.gpu.fp8_linear import why_not_fp8
from engine.gpu.graphs import CudaCapture, DecodeGraphs, graph_sizes
from engine.gpu.invariant_backend import InvariantBackend
from engine.gpu.memory import Graphs, LargestStep, blocks_for_card, profile, report_taken
from engine.gpu.tuning import MixedStep
from engine.kv_pool import KvPool, blocks_for_fraction, check_room
from engine.model_runner import ModelRunner
from engine.models.decoder import DecoderModel, RunnableModel
from engine.native.library import KernelsUnavailable, load_library
from engine.sampling.grammar import Grammars
from engine.sampling.grammar_matcher import DEFAULT_LIMITS, GrammarLimits
from engine.sampling.sampler import Sampler
from engine.tensor_parallel import Follower, LeadingAttention, LeadingModel, Ranks, SummedLinear
from protocol.errors import ConfigError
from protocol.layout import FP8, SPLIT, TOKENS, KvLayout
from scheduling.block_manager import BlockManager
from scheduling.scheduler import Scheduler, SchedulerConfig
from scheduling.step_model import StepModel

logger = logging.getLogger(__name__)

Allocate = Callable[[int], memoryview | None]
Card = CardBackend | InvariantBackend
EnterPhase = Callable[[str], None]
"""Called when a phase of loading begins: `kernels`, `weights`, `memory` or `graphs`."""
_DEFAULT_FRACTION = {"cpu": 0.3, "cuda": 0.85}


@dataclass(frozen=True)
class EngineConfig:
    """How to run a checkpoint. `None` and `auto` take their values from the checkpoint or the
    device: `num_blocks` from `memory_fraction`, `max_context` from the model."""

    folder: Path
    scheduler: SchedulerConfig
    dtype: str = "auto"
    device: str = "auto"
    num_blocks: int | None = None
    memory_fraction: float | None = None
    max_context: int | None = None
    attention: str = "auto"
    """`kernel`: our own C++ kernels on a CPU, FlashInfer on a card; `torch`: torch's operations;
    `auto`: kernels where they are available, else torch."""
    weights: str = "auto"
    """`exact16`: in `dtype`. With our own kernels `exact12`: the same bf16 numbers in 12 bits each;
    `int8`, `int4`: rounded to integers at load. `auto` also leaves quantized weights of a GGUF file
    as they are; the others dequantize them first. `fp8`: weights and inputs of matrix products in
    e4m3, on a card. `auto`: exact12 where it is available, else exact16."""
    kv_dtype: str = "auto"
    """The KV pool's dtype. `auto`: `dtype`; `fp8`: e4m3, where kernels compute attention."""
    kv_order: str = "auto"
    """The order of keys and values in a block. `tokens`: token by token; `pairs`: the order of the
    kernels' products, where supported, else `tokens`; `auto`: the fastest on this device."""
    kernels_dir: Path | None = None
    """A folder of kernels that `build_library` has built; they need no compiler."""
    cuda_graphs: bool = True
    """Whether a card captures its decode steps as CUDA graphs, unless torch computes attention."""
    batch_invariant: bool = False
    """Whether a sequence's results may not depend on what else is in its steps. On a card, slower
    kernels compute attention and products; on a CPU our own kernels are required."""
    grammars: GrammarLimits = DEFAULT_LIMITS
    open_tensors: OpenTensors | None = None
    """Opens another worker's tensors, which are loaded in place of those in `folder`."""


@dataclass(frozen=True)
class LoadedEngine:
    """An engine, the pool that a transport has to register, and the factory of grammar matchers."""

    engine: Engine
    pool: KvPool
    config: ModelConfig
    grammars: Grammars


def pick_device(name: str) -> torch.device:
    """The device of this name; `auto` is CUDA if there is a card, else CPU. Raises ConfigError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name} was asked for, but torch sees no CUDA card; use cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def load_engine(
    config: EngineConfig,
    clock: Callable[[], float],
    allocate: Allocate = lambda num_bytes: None,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
    enter: EnterPhase = lambda phase: None,
) -> LoadedEngine:
    """Load a checkpoint. `allocate` may provide the KV pool's memory.

    On a card, the thread that loads the engine has to run it. With `ranks` the engine holds rank
    0's shard of weights and pool, and leads the others, which call `load_follower` meanwhile.

    Raises ModelLoadError for the checkpoint, ConfigError for the settings, and TransferError if the
    tensors of another worker do not come.
    """
    return _load(config, progress, ranks, enter).assembled(clock, allocate, enter)


def load_follower(
    config: EngineConfig,
    ranks: Ranks,
    allocate: Allocate = lambda num_bytes: None,
    progress: Progress | None = None,
) -> tuple[Follower, KvPool]:
    """The follower on another rank of rank 0's engine, loaded with the same `config`, and its pool.

    Only tests use this function until workers of several cards use it. Raises the same errors as
    `load_engine`.
    """
    parts = _load(config, progress, ranks)
    pool = parts.pool(allocate)
    return Follower(parts.model, parts.attention(pool), ranks), pool


def _load(
    config: EngineConfig,
    progress: Progress | None,
    ranks: Ranks | None,
    enter: EnterPhase = lambda phase: None,
) -> _Parts:
    enter("kernels")
    device = pick_device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # the thread's card gets all kernels, streams and events
    whole = load_model_config(config.folder)
    model_config = whole if ranks is None else whole.sharded(ranks.shard.size)
    context = _context(config, model_config)
    dtype = model_config.dtype if config.dtype == "auto" else config.dtype
    kernels = _kernels(config, device, dtype, model_config.head_dim)
    has_kernel = kernels is not None and supports(dtype, model_config.head_dim)
    if config.batch_invariant and device.type != "cuda":
        check_cpu_kernels(dtype, has_kernel and _has_products(dtype, kernels))
    kv_dtype = _kv_dtype(config, dtype, device, has_kernel)
    card = _card_backend(config, device, model_config, dtype, kv_dtype)
    weight_bits = _weight_bits(config.weights, dtype, kernels, device)
    enter("weights")
    theirs = None if config.open_tensors is None else config.open_tensors()
    fingerprint = model_fingerprint(config.folder) if theirs is None else theirs.fingerprint
    keeps_blocks = _keeps_blocks(config, dtype, kernels, ranks)
    if weight_bits not in (16, 12):  # rounded weights compute different KV
        fingerprint += f"-{config.weights}"
    elif keeps_blocks:
        fingerprint += "-blocks"
    if kv_dtype == FP8:  # the layout does not say in which type it was computed
        fingerprint += f"-{dtype}"
    if card and card.numerics:  # keys and values have the same bits only if computed alike
        fingerprint += f"-{card.numerics}"
    layout = whole.kv_layout(fingerprint, config.scheduler.block_size, kv_dtype)
    if dtype == "bfloat16" and kernels is not None:
        order = _order(config.kv_order, orders_for(layout, kernels), ranks is not None)
        layout = msgspec.structs.replace(layout, order=order)
    shard = None if ranks is None else ranks.shard
    model = DecoderModel(
        model_config,
        load_block_weights(config.folder, whole, torch_dtype(dtype), progress)
        if keeps_blocks
        else load_weights(
            theirs or config.folder, whole, device, torch_dtype(dtype), progress, shard
        ),
        kernels,
        weight_bits,
        card.ops() if card else None,
        card.linear if card else None,
    )
    if ranks is not None:
        layout = layout.shard(ranks.shard.rank, ranks.shard.size)
        model.wrap_outputs(lambda part: SummedLinear(part, ranks))
    return _Parts(config, model_config, model, layout, context, kernels, card, ranks)


def _order(wanted: str, orders: Sequence[str], is_sharded: bool) -> str:
    """The wanted order if `orders` has it, the first for `auto`, else `tokens`. Sharded pools
    cannot use the split order."""
    orders = [order for order in orders if not is_sharded or order != SPLIT]
    return wanted if wanted in orders else orders[0] if wanted == "auto" else TOKENS


def _context(config: EngineConfig, model_config: ModelConfig) -> int:
    """The most tokens of prompt and output together. Raises ConfigError."""
    longest = model_config.max_position_embeddings
    if config.max_context is not None and config.max_context > longest:
        raise ConfigError(
            f"max_context {config.max_context} is more than the model's own limit, {longest}"
        )
    return config.max_context or longest


def _kernels(
    config: EngineConfig, device: torch.device, dtype: str, head_dim: int
) -> ctypes.CDLL | None:
    """The C++ kernels, if wanted and available; ConfigError if required and not available."""
    attention = config.attention
    if attention == "torch" or device.type == "cuda":  # a card's kernels are FlashInfer's
        return None
    if attention == "auto" and device.type != "cpu":
        return None
    try:
        if device.type != "cpu":
            raise KernelsUnavailable(f"its kernels run on a CPU, not on {device}")
        if attention == "kernel" and not supports(dtype, head_dim):
            raise KernelsUnavailable(
                f"it takes float32 or bfloat16 and an even head_dim, not {dtype} and {head_dim}"
            )
        return load_library(prebuilt=config.kernels_dir)
    except KernelsUnavailable as error:
        if attention == "kernel":
            raise ConfigError(f"attention is 'kernel', but {error}") from error
        logger.warning("attention by torch, slower than our own kernels: %s", error)
        return None


def _has_products(dtype: str, kernels: ctypes.CDLL | None) -> bool:
    """Whether our own kernels multiply weights of this dtype."""
    return dtype == "bfloat16" and kernels is not None and bool(kernels.baton_has_linear())


def _weight_bits(
    weights: str, dtype: str, kernels: ctypes.CDLL | None, device: torch.device
) -> int:
    """Bits per weight: 16 means the weights in `dtype`, 12 the same values packed. Raises
    ConfigError."""
    is_ours = _has_products(dtype, kernels)
    if weights == "exact16":
        return 16
    if weights == "auto":
        return 12 if is_ours else 16
    if weights == "fp8":
        _check_fp8(dtype, device)
        return 8
    if not is_ours:
        raise ConfigError(
            f"weights {weights} needs dtype bfloat16 and our own kernels, on a CPU with AVX2; "
            "use auto, or on a card fp8"
        )
    return {"exact12": 12, "int8": 8, "int4": 4}[weights]


def _keeps_blocks(
    config: EngineConfig, dtype: str, kernels: ctypes.CDLL | None, ranks: Ranks | None
) -> bool:
    """Whether quantized weights of a GGUF file are there and multiplied as they are. Another worker
    sends none."""
    may_keep = _has_products(dtype, kernels) and config.weights == "auto" and ranks is None
    return may_keep and config.open_tensors is None and has_blocks(config.folder)


def _check_fp8(dtype: str, device: torch.device) -> None:
    """Raises ConfigError unless fp8 weights work with this dtype and `device`."""
    if device.type != "cuda":
        raise ConfigError(f"weights fp8 needs a CUDA card, not {device}; on a CPU use int8 or int4")
    if dtype != "bfloat16":
        raise ConfigError(f"weights fp8 needs dtype bfloat16, not {dtype}; use auto")
    reason = why_not_fp8(torch.cuda.get_device_capability(device), torch.__version__)
    if reason:
        raise ConfigError(f"weights fp8 {reason}; use auto")
    try:
        importlib.import_module("triton")
    except ImportError as error:
        raise ConfigError(f"weights fp8 needs Triton: {error}") from error


def _kv_dtype(config: EngineConfig, dtype: str, device: torch.device, has_kernel: bool) -> str:
    """The name of the KV pool's dtype; `has_kernel` says whether a CPU kernel supports this model.

    Raises ConfigError if fp8 is requested and not supported.
    """
    if config.kv_dtype == "auto":
        return dtype
    on_card = device.type == "cuda" and config.attention != "torch"
    if on_card:
        capability = torch.cuda.get_device_capability(device)
        if capability < MIN_CAPABILITY:
            raise ConfigError(f"kv_dtype fp8 {needs_capability(capability)}; use auto")
    if on_card or has_kernel:
        return FP8
    raise ConfigError(
        "kv_dtype fp8 needs our own kernels on a CPU (dtype float32 or bfloat16, an even head_dim) "
        f"or FlashInfer's on a CUDA card, not device {device}, dtype {dtype} and attention "
        f"{config.attention}; use auto"
    )


def _card_backend(
    config: EngineConfig,
    device: torch.device,
    model_config: ModelConfig,
    dtype: str,
    kv_dtype: str,
) -> Card | None:
    """FlashInfer's kernels, if wanted and available; like `_kernels`, for a card. In
    batch-invariant mode, our own."""
    if device.type == "cuda" and config.batch_invariant:
        check_card_settings(config.attention, config.weights)
        return InvariantBackend(model_config, device, torch_dtype(dtype))
    if config.attention == "torch" or device.type != "cuda":
        return None
    try:
        return CardBackend(
            model_config,
            device,
            torch_dtype(dtype),
            kv_torch_dtype(kv_dtype),
            config.scheduler.max_batch_size,
        )
    except FlashInferUnavailable as error:
        for name, asked in (("attention", config.attention), ("kv_dtype", config.kv_dtype)):
            if asked != "auto":
                raise ConfigError(f"{name} is {asked!r}, but {error}") from error
        logger.warning("attention by torch, much slower than FlashInfer: %s", error)
        return None


@dataclass(frozen=True)
class _Parts:
    """A loaded model and everything else that the engine is assembled from."""

    config: EngineConfig
    model_config: ModelConfig
    model: DecoderModel
    layout: KvLayout
    context: int  # tokens of a request, at most
    kernels: ctypes.CDLL | None
    card: Card | None
    ranks: Ranks | None

    def assembled(
        self, clock: Callable[[], float], allocate: Allocate, enter: EnterPhase
    ) -> LoadedEngine:
        """Assemble the engine. Raises ConfigError if no block fits into memory."""
        enter("memory")
        config, layout = self.config, self.layout
        pool = self.pool(allocate)
        vocab_size, end_ids = self.model_config.vocab_size, self.model_config.eos_token_ids
        limits = EngineLimits(vocab_size, min(self.context, pool.num_blocks * layout.block_size))
        file = config.folder / "tokenizer.json"
        grammars = Grammars(file, vocab_size, end_ids, config.grammars)
        enter("graphs")
        graphs = self.graphs(pool, limits.max_context)
        sampler = self.sampler()
        model, attention = self.computing(pool)
        step = self.model.fused_step(attention)
        runner = ModelRunner(model, attention, sampler, grammars, graphs, step)
        scheduler = Scheduler(
            config.scheduler, BlockManager(pool.num_blocks, pool.forget), StepModel()
        )
        engine = Engine(scheduler, runner, layout, limits, clock)
        if pool.device.type == "cuda":
            report_taken(pool.device, pool)
        return LoadedEngine(engine, pool, self.model_config, grammars)

    def pool(self, allocate: Allocate) -> KvPool:
        """The KV pool, with the same number of blocks on every rank."""
        num_blocks = self.config.num_blocks or self.pool_size(self.context)
        if self.ranks is not None:
            num_blocks = self.ranks.least(num_blocks)
        check_room(self.layout, num_blocks, self.model.device)
        buffer = allocate(num_blocks * self.layout.block_bytes)
        return KvPool(self.layout, num_blocks, self.model.device, buffer)

    def computing(self, pool: KvPool) -> tuple[RunnableModel, AttentionBackend]:
        """The model and its attention for the runner."""
        attention = self.measured_attention(pool)
        if self.ranks is None:
            return self.model, attention
        return LeadingModel(self.model, self.ranks), LeadingAttention(attention)

    def attention(self, pool: KvPool) -> AttentionBackend:
        """The attention backend for any batch over `pool`."""
        windows, num_heads = self.model_config.sliding_windows, self.model_config.num_heads
        if self.card is not None:
            return self.card.attention(pool)
        if self.kernels is not None and supports(pool.layout.dtype, pool.layout.head_dim):
            return KernelAttention(pool, windows, num_heads, self.kernels)
        return TorchAttention(pool, windows)

    def sampler(self) -> Sampler:
        """The sampler, with a card's kernel where there is one."""
        vocab_size = self.model_config.vocab_size
        if self.card is not None:
            log_totals = self.card.log_totals()
            return Sampler(vocab_size, find_cut=self.card.find_cut(), log_totals=log_totals)
        return Sampler(vocab_size, self.kernels)

    def measured_attention(self, pool: KvPool) -> AttentionBackend:
        """Like `attention`; on a card this may time steps to choose the faster kernels."""
        if self.card is None:
            return self.attention(pool)
        scheduler = self.config.scheduler
        sizes = (scheduler.max_batch_size, scheduler.chunk_max_tokens, self.context)
        return self.card.tuned_attention(pool, MixedStep.typical(*sizes))

    def graphs(self, pool: KvPool, max_context: int) -> DecodeGraphs | None:
        """Capture the decode graphs; None without a card, with graphs turned off, or with ranks."""
        if self.card is None or not self.config.cuda_graphs or self.ranks is not None:
            return None
        size = self.config.scheduler.max_batch_size
        most_blocks = size * -(-max_context // self.layout.block_size)
        make_attention = self.card.fixed_decodes(pool, size, most_blocks)
        return DecodeGraphs(self.model, make_attention, graph_sizes(size), CudaCapture())

    def planned_graphs(self) -> Graphs:
        """Numbers of the graphs that `graphs` will capture, for sizing memory."""
        captures = self.card is not None and self.config.cuda_graphs and self.ranks is None
        sizes = graph_sizes(self.config.scheduler.max_batch_size) if captures else []
        return Graphs(len(sizes), self.card.graph_wrappers if self.card else 0)

    def pool_size(self, context: int) -> int:
        """The blocks that fit into the configured fraction of memory, but no more than a full batch
        at full context can use: the whole pool is allocated at the start."""
        scheduler, device = self.config.scheduler, self.model.device
        fraction = self.config.memory_fraction or _DEFAULT_FRACTION[device.type]
        if device.type == "cuda":
            num_sequences = scheduler.max_batch_size
            num_tokens = min(scheduler.chunk_max_tokens, context) + num_sequences
            largest = LargestStep(num_tokens, num_sequences)
            memory = profile(
                self.model,
                self.layout,
                self.attention,
                largest,
                self.sampler(),
                self.planned_graphs(),
            )
            fitting = blocks_for_card(self.layout, memory, fraction)
        else:
            fitting = blocks_for_fraction(self.layout, device, fraction)
        return min(fitting, scheduler.max_batch_size * -(-context // self.layout.block_size))
