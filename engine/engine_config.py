"""How an engine is to run a checkpoint, as its worker's settings say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.stored_tensors import OpenTensors
from engine.sampling.grammar_matcher import DEFAULT_LIMITS, GrammarLimits
from protocol.layout import ALL_TOKENS
from scheduling.scheduler import SchedulerConfig


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
    activations: str = "auto"
    """What products multiply weights by. `auto`: inputs in `dtype`; `int8`: inputs rounded to
    integers where weights are integers, too, on a CPU that multiplies them fast, else as `auto`."""
    kv_dtype: str = "auto"
    """The KV pool's dtype. `auto`: `dtype`; `fp8`: e4m3, where kernels compute attention."""
    kv_order: str = "auto"
    """The order of keys and values in a block. `tokens`: token by token; `pairs`: the order of the
    kernels' products, where supported, else `tokens`; `auto`: the fastest on this device."""
    kv_windows: str = ALL_TOKENS
    """What layers with a window keep of a sequence: ALL_TOKENS, or WINDOW, what the window still
    reaches (on a CPU). `auto`: WINDOW there if other layers keep all tokens."""
    peer_tensor_parallel: int | None = None
    """The ranks of a stage of the workers that blocks are exchanged with; None: as here. If they
    are other than here, blocks lie so that what two ranks share is contiguous."""
    peer_pipeline_parallel: int | None = None
    """Those workers' stages; None: as here."""
    kernels_dir: Path | None = None
    """A folder of kernels that `build_library` has built; they need no compiler."""
    cuda_graphs: bool = True
    """Whether a card captures its decode steps as CUDA graphs, unless torch computes attention."""
    card_sums: str = "auto"
    """How ranks on cards add up: `nccl`; `symmetric`: small sums through memory that all cards map;
    `auto`: what measures faster for each size."""
    batch_invariant: bool = False
    """Whether a sequence's results may not depend on what else is in its steps. On a card, slower
    kernels compute attention and products; on a CPU our own kernels are required."""
    grammars: GrammarLimits = DEFAULT_LIMITS
    open_tensors: OpenTensors | None = None
    """Opens another worker's tensors, which are loaded in place of those in `folder`."""
