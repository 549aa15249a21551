"""Builds a runnable engine from a checkpoint's folder.

Reads the configuration, chooses the backend, which checks the settings, loads the weights, and
wires scheduler, runner, attention and sampler. Errors in the checkpoint or the settings are raised
before anything large is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import msgspec
import torch

from checkpoint.vocabularies.tokenizer_json import tokenizer_file
from engine.backend import Backend, Sizes
from engine.checkpoint.config import load_model_config
from engine.checkpoint.files import model_fingerprint
from engine.checkpoint.formats.kv_scales import add_kv_scales, note_unused_scales
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.model_weights import Weights
from engine.checkpoint.shard import Shard
from engine.checkpoint.stored_tensors import FileTensors, StoredTensors
from engine.checkpoint.weights import Progress, has_blocks, load_block_weights, load_weights
from engine.cpu.backend import cpu_backend
from engine.device import pick_device, torch_dtype
from engine.engine import Engine, EngineLimits
from engine.engine_config import EngineConfig
from engine.gpu.choice import card_backend
from engine.kv_pool import KvPool, check_room
from engine.model_runner import ModelRunner
from engine.models.decoder import DecoderModel
from engine.parallel.backend import RankBackend
from engine.parallel.blocks_under_way import BlocksUnderWay
from engine.parallel.follower import Follower
from engine.parallel.leader import LeadingModel
from engine.parallel.pipeline_runner import PipelineRunner
from engine.parallel.ranks import Ranks
from engine.runner import AnyRunner
from engine.sampling.grammar import Grammars
from protocol.errors import ConfigError
from protocol.layout import ALL_TOKENS, FP8, SPLIT, TOKENS, KvLayout, kept_grouping
from scheduling.block_pools import BlockPools
from scheduling.pool_sizes import pool_bytes
from scheduling.scheduler import Scheduler
from scheduling.step_model import StepModel

Allocate = Callable[[int], memoryview | None]
EnterPhase = Callable[[str], None]
"""Called when a phase of loading begins: `kernels`, `weights`, `memory` or `graphs`."""


@dataclass(frozen=True)
class LoadedEngine:
    """An engine, the pool that a transport has to register, and the factory of grammar matchers."""

    engine: Engine
    pool: KvPool
    config: ModelConfig
    grammars: Grammars


def load_engine(
    config: EngineConfig,
    clock: Callable[[], float],
    allocate: Allocate = lambda num_bytes: None,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
    enter: EnterPhase = lambda phase: None,
) -> LoadedEngine:
    """Load a checkpoint. `allocate` may provide the KV pool's memory, for all ranks of this host
    one after the other.

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

    `allocate` provides the memory that was allocated for the pools of all ranks of this host.
    Raises the same errors as `load_engine`.
    """
    loaded = _load(config, progress, ranks)
    pool = loaded.pool(allocate)
    graphs = loaded.backend.graphs(loaded.model, pool, loaded.sizes)
    attention = loaded.backend.tuned_attention(pool, loaded.sizes)
    step = loaded.model.whole_step(attention)
    has_own_pool = ranks.groups is not None
    under_way = BlocksUnderWay(loaded.layout.block_size) if has_own_pool else None
    return Follower(loaded.model, attention, ranks, under_way, step, graphs), pool


def _load(
    config: EngineConfig,
    progress: Progress | None,
    ranks: Ranks | None,
    enter: EnterPhase = lambda phase: None,
) -> _Loaded:
    enter("kernels")
    whole = load_model_config(config.folder)
    context = _context(config, whole)
    part = whole if ranks is None else whole.part_of(ranks.shard)
    backend = choose_backend(config, part, ranks)
    enter("weights")
    theirs = None if config.open_tensors is None else config.open_tensors()
    fingerprint = model_fingerprint(config.folder) if theirs is None else theirs.fingerprint
    dtype = torch_dtype(backend.dtype)
    if backend.keeps_blocks and theirs is None and has_blocks(config.folder, whole):
        fingerprint += "-blocks"
        weights = load_block_weights(
            config.folder, whole, dtype, progress, backend.device, backend.shard
        )
    else:
        weights = load_weights(
            theirs or config.folder, whole, backend.device, dtype, progress, backend.shard
        )
    if _scale_kv(weights, theirs or FileTensors(config.folder), backend, part):
        fingerprint += "-scaled"
    layout = _layout(config, whole, backend, fingerprint)
    scheduler = config.scheduler
    sizes = Sizes(
        scheduler.max_batch_size,
        scheduler.chunk_max_tokens,
        context,
        config.num_blocks,
        config.memory_fraction,
        captures=config.cuda_graphs,
    )
    local = range(1) if ranks is None else ranks.local
    model = DecoderModel(part, weights, backend)
    return _Loaded(config, part, backend, model, layout, sizes, local)


def _scale_kv(
    weights: Weights, tensors: StoredTensors, backend: Backend, part: ModelConfig
) -> bool:
    """Let a pool of fp8 hold keys and values divided by the checkpoint's scales; whether it has
    any."""
    if backend.kv_dtype == FP8:
        return add_kv_scales(weights, tensors, part, backend.shard)
    note_unused_scales(tensors)
    return False


def choose_backend(config: EngineConfig, model: ModelConfig, ranks: Ranks | None) -> Backend:
    """The backend for the settings' device, and for a rank if there are several; `model` is the
    rank's share. Raises ConfigError for settings that the backend does not support."""
    if model.latent is not None:
        _check_latent(config)
    device = pick_device(config.device)
    if model.state_numbers is not None and device.type != "cpu":
        raise ConfigError(
            "layers of this model keep states, which workers on a CPU serve: set device to cpu"
        )
    if model.state_numbers is not None and config.batch_invariant:
        raise ConfigError(
            "batch_invariant is true, but torch computes the states of this model's layers; leave "
            "it out"
        )
    dtype = _dtype(config, model, device)
    backend: Backend
    if device.type == "cuda":
        torch.cuda.set_device(device)  # the thread's card gets all kernels, streams and events
        backend = card_backend(config, model, device, dtype)
    else:
        backend = cpu_backend(config, model, device, dtype)
    return backend if ranks is None else RankBackend(backend, ranks, model)


def _check_latent(config: EngineConfig) -> None:
    """Raises ConfigError for settings that need kernels for latent attention."""
    for name, needs_kernels in (
        ("attention", config.attention == "kernel"),
        ("kv_dtype", config.kv_dtype != "auto"),
        ("batch_invariant", config.batch_invariant),
    ):
        if needs_kernels:
            value = str(getattr(config, name)).lower()
            raise ConfigError(
                f"{name} is {value}, but torch computes this model's latent attention; leave it out"
            )


def _dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> str:
    """The dtype of activations. Our kernels of a CPU multiply quantized weights by bf16 only, and
    formats of integers usually say fp16."""
    if config.dtype != "auto":
        return config.dtype
    is_quantized = model.quantization is not None and device.type == "cpu"
    return "bfloat16" if is_quantized and model.dtype == "float16" else model.dtype


def _context(config: EngineConfig, model: ModelConfig) -> int:
    """The most tokens of prompt and output together. Raises ConfigError."""
    longest = model.max_position_embeddings
    if config.max_context is not None and config.max_context > longest:
        raise ConfigError(
            f"max_context {config.max_context} is more than the model's own limit, {longest}"
        )
    return config.max_context or longest


def _layout(
    config: EngineConfig, whole: ModelConfig, backend: Backend, fingerprint: str
) -> KvLayout:
    """The layout of the backend's share of the pool; its fingerprint names all that decides the
    bits of keys and values."""
    if backend.rounds_weights:  # rounded weights compute different KV
        fingerprint += f"-{config.weights}"
    if backend.kv_dtype == FP8:  # the layout does not say in which type it was computed
        fingerprint += f"-{backend.dtype}"
    if backend.numerics:  # keys and values have the same bits only if computed alike
        fingerprint += f"-{backend.numerics}"
    layout = whole.kv_layout(fingerprint, config.scheduler.block_size, backend.kv_dtype)
    shard = backend.shard
    peer_stages = _peer_stages(config, shard)
    orders = backend.orders(layout)
    if peer_stages:
        orders = [order for order in orders if order != SPLIT]
    order = order_of(config.kv_order, orders)
    has_groups = backend.device.type == "cpu"
    kv_windows = config.kv_windows if has_groups or config.kv_windows != "auto" else ALL_TOKENS
    grouping = kept_grouping(whole.kv_grouping(), kv_windows)
    if grouping and not has_groups:
        raise ConfigError("kv_windows window is for workers on a CPU: set it to all")
    layout = msgspec.structs.replace(
        layout, order=order, grouping=grouping, peer_stages=peer_stages
    )
    return layout.shard(shard.rank, shard.size, shard.stage, shard.num_stages)


def _peer_stages(config: EngineConfig, shard: Shard) -> int:
    """The stages of workers that divide heads in another way; 0 if there are none."""
    if (config.peer_tensor_parallel or shard.size) == shard.size:
        return 0
    return config.peer_pipeline_parallel or shard.num_stages


def order_of(wanted: str, orders: Sequence[str]) -> str:
    """The wanted order if `orders` has it, the first for `auto`, else `tokens`."""
    return wanted if wanted in orders else orders[0] if wanted == "auto" else TOKENS


@dataclass(frozen=True)
class _Loaded:
    """A loaded model and everything else that the engine is assembled from."""

    config: EngineConfig
    model_config: ModelConfig  # the backend's share
    backend: Backend
    model: DecoderModel
    layout: KvLayout
    sizes: Sizes
    local: range  # the ranks on this host

    def pool(self, allocate: Allocate) -> KvPool:
        """The KV pool, with the same number of blocks on every rank. Rank 0 holds the parts of all
        ranks on its host."""
        layout, device = self.layout, self.model.device
        num_blocks = self.backend.num_blocks(self.model, layout, self.sizes)
        ranks = layout.ranks[self.local.start : self.local.stop]
        ends = [0, *accumulate(pool_bytes(rank, num_blocks) for rank in ranks)]
        if layout.rank == self.local.start:
            check_room(ends[-1], num_blocks, device)
        memory = allocate(ends[-1])
        if memory is None:
            return KvPool(layout, num_blocks, device)
        buffers = [memory[start:end] for start, end in pairwise(ends)]
        if layout.rank:
            return KvPool(layout, num_blocks, device, buffers[layout.rank - self.local.start])
        others = [
            KvPool(rank, num_blocks, device, buffer)
            for rank, buffer in zip(ranks[1:], buffers[1:], strict=True)
        ]
        return KvPool(layout, num_blocks, device, buffers[0], others)

    def assembled(
        self, clock: Callable[[], float], allocate: Allocate, enter: EnterPhase
    ) -> LoadedEngine:
        """Assemble the engine. Raises ConfigError if no block fits into memory."""
        enter("memory")
        config, backend, model = self.config, self.backend, self.model
        pool = self.pool(allocate)
        vocab_size, end_ids = self.model_config.vocab_size, self.model_config.eos_token_ids
        file = tokenizer_file(config.folder)
        grammars = Grammars(file, vocab_size, end_ids, config.grammars)
        pools = BlockPools.of(self.layout, pool.num_pages, [each.forget for each in pool.groups])
        scheduler = Scheduler(config.scheduler, pools, StepModel())
        context = min(self.sizes.context, scheduler.most_tokens)
        enter("graphs")
        graphs = backend.graphs(model, pool, replace(self.sizes, context=context))
        attention, sampler = backend.tuned_attention(pool, self.sizes), backend.sampler()
        runnable = backend.runnable(model)
        step = runnable.whole_step(attention)
        own = ModelRunner(runnable, attention, sampler, grammars, graphs, step)
        runner: AnyRunner = own
        if isinstance(runnable, LeadingModel) and backend.shard.num_stages > 1:
            runner = PipelineRunner(own, runnable)
        limits = EngineLimits(vocab_size, context)
        engine = Engine(scheduler, runner, self.layout, limits, clock, model.expert_loads)
        if isinstance(runnable, LeadingModel):
            engine.rank_times = runnable.rank_times
        backend.report(pool)
        return LoadedEngine(engine, pool, self.model_config, grammars)
