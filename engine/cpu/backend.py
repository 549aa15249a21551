"""The backend of a model on a CPU: our own C++ kernels, or torch where they are not available."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence

import torch

from engine.attention.base import AttentionBackend
from engine.attention.cpu_attention import KernelAttention, orders_for, supports
from engine.attention.cpu_latents import KernelLatentAttention
from engine.attention.groups import by_group
from engine.attention.states import StateSlots
from engine.attention.torch_attention import TorchAttention
from engine.attention.torch_latents import TorchLatentAttention
from engine.backend import WHOLE, Sizes
from engine.checkpoint.experts_config import ExpertsConfig
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.quantized_blocks import BlockMatrix, Matrix
from engine.cpu.block_panels import BlockEmbedding
from engine.cpu.fused_pass import KernelPass, fused
from engine.cpu.huge_pages import HugePages
from engine.cpu.linear import cpu_linear
from engine.cpu.native_experts import ExpertsMemory, NativeExperts, can_pack_experts
from engine.cpu.native_linear import NativeLinear
from engine.cpu.native_ops import GATES, NativeOps
from engine.device import torch_dtype
from engine.engine_config import EngineConfig
from engine.kv_pool import KvPool, blocks_for_fraction
from engine.layers.embedding import Embedding, TorchEmbedding
from engine.layers.experts import Experts, ExpertWeights, TorchExperts
from engine.layers.linear import LinearLayer
from engine.layers.ops import LayerOps, TorchOps
from engine.models.parts import ModelParts
from engine.models.runnable import RunnableModel
from engine.native.library import KernelsUnavailable, load_library
from engine.sampling.sampler import Sampler
from protocol.errors import ConfigError
from protocol.layout import FP8, TOKENS, KvLayout

logger = logging.getLogger(__name__)

_DEFAULT_FRACTION = 0.3
_CPU = torch.device("cpu")
_BF16 = "bfloat16"
_EXACT_BITS = (16, 12)
MORE_BITS = {4: 5}
"""Bits of weights that lose most when they are rounded to so many."""


class CpuBackend:
    """A `Backend` by `kernels` (see engine.native) as far as they support the model, else by torch.

    With `weight_bits` 12 the kernels store the same values in fewer bits. With 8 or 4 the weights
    of all products are rounded to integers; instead of 4 bits, those of the logits and of layers
    that are added to the residual take 5. Without kernels, weights are in `dtype`. With
    `int8_inputs` the kernels multiply integers by inputs that are rounded to 8 bits.
    """

    shard = WHOLE

    def __init__(  # noqa: PLR0913 - all but three are keywords
        self,
        config: ModelConfig,
        dtype: str,
        kernels: ctypes.CDLL | None = None,
        *,
        weight_bits: int = 16,
        int8_inputs: bool = False,
        kv_dtype: str | None = None,
        keeps_blocks: bool = False,
        device: torch.device = _CPU,
    ) -> None:
        self.device = device
        self.dtype, self.kv_dtype = dtype, kv_dtype or dtype
        self.weight_bits = weight_bits
        self.rounds_weights = weight_bits not in _EXACT_BITS
        self.numerics = "int8_activations" if int8_inputs else ""
        self.keeps_blocks = keeps_blocks
        self._config = config
        self._kernels = kernels
        self._int8_inputs = int8_inputs
        self._memory = HugePages()
        self._experts_memory: ExpertsMemory | None = None

    def orders(self, layout: KvLayout) -> Sequence[str]:
        """See Backend."""
        is_latent = self._config.latent is not None
        if self._kernels is None or self.dtype != _BF16 or is_latent:
            return (TOKENS,)
        return orders_for(layout, self._kernels)

    def linear(self, weight: Matrix, bias: torch.Tensor | None) -> LinearLayer:
        """See Backend."""
        return self._linear(weight, bias, self.weight_bits)

    def output_linear(self, weight: Matrix, bias: torch.Tensor | None) -> LinearLayer:
        """See Backend."""
        return self._linear(weight, bias, self._more_bits)

    def experts(self, config: ExpertsConfig, weights: ExpertWeights) -> Experts:
        """See LayerFactory; torch computes experts whose activation the kernels do not have."""
        kernels, gate = self._kernels, GATES.get(self._config.hidden_act)
        if kernels is None or gate is None or not config.are_gated:
            return TorchExperts(config, weights, self.linear)
        if not can_pack_experts(kernels, weights):
            return TorchExperts(config, weights, self.linear)
        if self._experts_memory is None:
            self._experts_memory = ExpertsMemory(config, self._config.hidden_size)

        def pack(matrix: torch.Tensor | BlockMatrix, bias: torch.Tensor | None) -> NativeLinear:
            bits, int8_inputs = self.weight_bits, self._int8_inputs
            return NativeLinear(matrix, bias, kernels, bits, self._memory, int8_inputs)

        return NativeExperts(config, weights, pack, self._experts_memory, kernels, gate)

    def logits_linear(self, weight: Matrix) -> LinearLayer:
        """See Backend."""
        return self._linear(weight, None, self._more_bits)

    @property
    def _more_bits(self) -> int:
        return MORE_BITS.get(self.weight_bits, self.weight_bits)

    def _linear(self, weight: Matrix, bias: torch.Tensor | None, bits: int) -> LinearLayer:
        return cpu_linear(weight, bias, self._kernels, bits, self._memory, self._int8_inputs)

    def embedding(self, weight: torch.Tensor | BlockMatrix) -> Embedding:
        """See Backend."""
        if isinstance(weight, torch.Tensor):
            return TorchEmbedding(weight)
        assert self._kernels is not None
        return BlockEmbedding(weight, self._kernels)

    def ops(self) -> LayerOps:
        """See Backend."""
        activation, eps = self._config.hidden_act, self._config.rms_norm_eps
        if self._kernels is not None and self.dtype == _BF16:
            return NativeOps(activation, eps, self._kernels)
        return TorchOps(activation, eps, torch_dtype(self.dtype))

    def fuse(self, parts: ModelParts) -> KernelPass | None:
        """See Backend."""
        return None if self._kernels is None else fused(parts, self._kernels)

    def attention(self, pool: KvPool) -> AttentionBackend:
        """See Backend."""
        return by_group(pool, self._over)

    def _over(self, view: KvPool) -> AttentionBackend:
        if view.holds_states:
            return StateSlots(view)
        windows = [self._config.sliding_windows[layer] for layer in view.model_layers]
        layout, num_heads, latent = view.layout, self._config.num_heads, self._config.latent
        scoring = self._config.scoring
        kernels = self._kernels if supports(layout.dtype, layout.head_dim) else None
        if latent is not None and kernels is not None:
            return KernelLatentAttention(view, latent, num_heads, kernels)
        if latent is not None:
            return TorchLatentAttention(view, latent)
        if kernels is not None:
            return KernelAttention(view, windows, num_heads, kernels, scoring=scoring)
        return TorchAttention(view, windows, scoring=scoring)

    def tuned_attention(self, pool: KvPool, sizes: Sizes) -> AttentionBackend:
        """See Backend; nothing is tuned."""
        return self.attention(pool)

    def runnable(self, model: RunnableModel) -> RunnableModel:
        """See Backend."""
        return model

    def sampler(self) -> Sampler:
        """See Backend."""
        return Sampler(self._config.vocab_size, self._kernels)

    def captures(self, sizes: Sizes) -> bool:
        """See Backend; a CPU has no graphs."""
        return False

    def graphs(self, model: RunnableModel, pool: KvPool, sizes: Sizes) -> None:
        """See Backend; a CPU has none."""

    def num_blocks(self, model: RunnableModel, layout: KvLayout, sizes: Sizes) -> int:
        """See Backend."""
        if sizes.num_blocks:
            return sizes.num_blocks
        fraction = sizes.memory_fraction or _DEFAULT_FRACTION
        fitting = blocks_for_fraction(layout, self.device, fraction / sizes.sharing)
        return min(fitting, sizes.most_blocks(layout))

    def report(self, pool: KvPool) -> None:
        """See Backend; a CPU's memory is not counted."""


def cpu_backend(
    settings: EngineConfig, config: ModelConfig, device: torch.device, dtype: str
) -> CpuBackend:
    """The backend of the model of `config`, in `dtype`. Raises ConfigError for settings that this
    machine does not support."""
    kernels = _kernels(settings, config.head_dim, device, dtype)
    attends = kernels is not None and supports(dtype, config.head_dim)
    multiplies = dtype == _BF16 and kernels is not None and bool(kernels.baton_has_linear())
    if settings.batch_invariant and not (attends and multiplies):
        raise ConfigError(
            "batch_invariant on a CPU needs our own kernels for products and attention: dtype "
            f"bfloat16 (not {dtype}), attention auto or kernel, an even head_dim, and AVX2 or more"
        )
    if settings.kv_dtype != "auto" and not attends:
        raise ConfigError(
            "kv_dtype fp8 needs our own kernels on a CPU (dtype float32 or bfloat16, an even "
            f"head_dim) or FlashInfer's on a CUDA card, not device {device}, dtype {dtype} and "
            f"attention {settings.attention}; use auto"
        )
    return CpuBackend(
        config,
        dtype,
        kernels,
        weight_bits=_weight_bits(settings.weights, device, multiplies),
        int8_inputs=settings.activations == "int8" and _has_int8(kernels, multiplies),
        kv_dtype=dtype if settings.kv_dtype == "auto" else FP8,
        keeps_blocks=multiplies and settings.weights == "auto",
        device=device,
    )


def _kernels(
    settings: EngineConfig, head_dim: int, device: torch.device, dtype: str
) -> ctypes.CDLL | None:
    """The C++ kernels, if wanted and available; ConfigError if required and not available."""
    required = settings.attention == "kernel"
    if settings.attention == "torch" or (device.type != "cpu" and not required):
        return None
    try:
        if device.type != "cpu":
            raise KernelsUnavailable(f"its kernels run on a CPU, not on {device}")
        if required and not supports(dtype, head_dim):
            raise KernelsUnavailable(
                f"it takes float32 or bfloat16 and an even head_dim, not {dtype} and {head_dim}"
            )
        return load_library(prebuilt=settings.kernels_dir)
    except KernelsUnavailable as error:
        if required:
            raise ConfigError(f"attention is 'kernel', but {error}") from error
        logger.warning("torch computes attention, slower than our own kernels would: %s", error)
        return None


def _has_int8(kernels: ctypes.CDLL | None, multiplies: bool) -> bool:
    """Whether products with inputs of 8 bits are fast here; if not, the log says so. `multiplies`:
    whether our kernels compute products. Raises ConfigError if they do not."""
    if kernels is None or not multiplies:
        raise ConfigError(
            "activations int8 needs dtype bfloat16 and our own kernels, on a CPU with AVX-512 "
            "VNNI; use auto"
        )
    if kernels.baton_has_int8():
        return True
    logger.warning(
        "activations stay bfloat16: products of 8-bit integers need a CPU with AVX-512 VNNI and "
        "without AMX, whose tiles multiply bfloat16 faster"
    )
    return False


def _weight_bits(weights: str, device: torch.device, multiplies: bool) -> int:
    """Bits per weight: 16 means the weights in the model's dtype, 12 the same values packed;
    `multiplies`: whether our kernels compute products."""
    if weights == "fp8":
        raise ConfigError(f"weights fp8 needs a CUDA card, not {device}; on a CPU use int8 or int4")
    if weights == "auto":
        return 12 if multiplies else 16
    if weights != "exact16" and not multiplies:
        raise ConfigError(
            f"weights {weights} needs dtype bfloat16 and our own kernels, on a CPU with AVX2; "
            "use auto, or on a card fp8"
        )
    return {"exact16": 16, "exact12": 12, "int8": 8, "int4": 4}[weights]
