"""Chooses the backend of a model on a card, by the settings and the machine."""

from __future__ import annotations

import importlib
import logging

import torch

from engine.attention.flashinfer_attention import FlashInferUnavailable
from engine.checkpoint.model_config import ModelConfig
from engine.device import kv_torch_dtype, torch_dtype
from engine.engine_config import EngineConfig
from engine.gpu.backend import CardBackend
from engine.gpu.flashinfer_backend import FlashInferBackend
from engine.gpu.fp8_format import MIN_CAPABILITY, needs_capability
from engine.gpu.fp8_linear import why_not_fp8
from engine.gpu.invariant_backend import InvariantBackend
from protocol.errors import ConfigError
from protocol.layout import FP8

logger = logging.getLogger(__name__)


def card_backend(
    settings: EngineConfig, config: ModelConfig, device: torch.device, dtype: str
) -> CardBackend:
    """The backend of the model of `config`, in `dtype`. Kernels are built and run once, before
    weights take memory. Raises ConfigError for settings that the card does not support."""
    if settings.activations != "auto":
        raise ConfigError("activations int8 is for our own kernels, on a CPU; on a card use auto")
    if settings.batch_invariant:
        _check_invariant(settings)
    kv_dtype = kv_torch_dtype(_kv_dtype(settings, device, dtype))
    keeps_fp8 = _keeps_fp8(settings, config, device, dtype)
    weight_bits = _weight_bits(settings.weights, device, dtype)
    backend = _backend(settings, config, device, (torch_dtype(dtype), kv_dtype, weight_bits))
    if keeps_fp8:
        backend.keep_fp8()
    return backend


def _backend(
    settings: EngineConfig,
    config: ModelConfig,
    device: torch.device,
    numbers: tuple[torch.dtype, torch.dtype, int],
) -> CardBackend:
    """The fastest backend for `numbers`: the dtypes of activations and KV, and bits per weight."""
    computed, kv_dtype, weight_bits = numbers
    if config.latent is not None:
        logger.warning("latent attention by torch: no kernel of a card is used for it")
        return CardBackend(config, device, computed, kv_dtype, weight_bits)
    if settings.batch_invariant:
        return InvariantBackend(config, device, computed, kv_dtype)
    if settings.attention != "torch":
        try:
            if config.has_sinks:
                raise FlashInferUnavailable("FlashInfer's attention is used without sinks")
            max_sequences = settings.scheduler.max_batch_size
            return FlashInferBackend(
                config, device, computed, kv_dtype, max_sequences, weight_bits=weight_bits
            )
        except FlashInferUnavailable as error:
            for name in ("attention", "kv_dtype"):
                asked = getattr(settings, name)
                if asked != "auto":
                    raise ConfigError(f"{name} is {asked!r}, but {error}") from error
            logger.warning("attention by torch, much slower than FlashInfer: %s", error)
    return CardBackend(config, device, computed, kv_dtype, weight_bits)


def _keeps_fp8(
    settings: EngineConfig, config: ModelConfig, device: torch.device, dtype: str
) -> bool:
    """Whether the checkpoint's weights are multiplied as they are. Raises ConfigError for quantized
    weights that no kernel of a card multiplies."""
    quantization = config.quantization
    if quantization is None or not quantization.groups or settings.weights != "auto":
        return False
    if not quantization.is_fp8_by_rows:
        reason = f"no kernel of a card multiplies this checkpoint's {quantization.method} weights"
    elif config.experts is not None:
        reason = "no kernel of a card multiplies experts in fp8"
    elif settings.batch_invariant:
        reason = "with batch_invariant no kernel multiplies fp8"
    else:
        reason = _why_no_fp8(device, dtype)
        reason = reason and f"the checkpoint's fp8 {reason}"
    if reason:
        raise ConfigError(f"weights is 'auto', but {reason}; use exact16, which dequantizes them")
    return True


def _check_invariant(settings: EngineConfig) -> None:
    """Raises ConfigError for settings that the batch-invariant kernels do not support."""
    if settings.attention != "auto":
        computes = "FlashInfer" if settings.attention == "kernel" else "torch"
        raise ConfigError(
            f"attention is {settings.attention!r}, but on a card {computes}'s results depend on "
            "the batch; with batch_invariant use auto"
        )
    if settings.weights == "fp8":
        raise ConfigError(
            "weights is 'fp8', but its products depend on the batch; with batch_invariant use auto"
        )


def _kv_dtype(settings: EngineConfig, device: torch.device, dtype: str) -> str:
    """The name of the KV pool's dtype."""
    if settings.kv_dtype == "auto":
        return dtype
    if settings.attention == "torch":
        raise ConfigError("kv_dtype fp8 needs kernels for attention, not attention torch; use auto")
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        raise ConfigError(f"kv_dtype fp8 {needs_capability(capability)}; use auto")
    return FP8


def _weight_bits(weights: str, device: torch.device, dtype: str) -> int:
    """Bits per weight: 16 in `dtype`, 8 in fp8."""
    if weights in ("auto", "exact16"):
        return 16
    if weights != "fp8":
        raise ConfigError(
            f"weights {weights} is for our own kernels, on a CPU; on a card use auto or fp8"
        )
    reason = _why_no_fp8(device, dtype)
    if reason:
        raise ConfigError(f"weights fp8 {reason}; use auto")
    return 8


def _why_no_fp8(device: torch.device, dtype: str) -> str:
    """Why products in fp8 are not available; "" if they are."""
    if dtype != "bfloat16":
        return f"needs dtype bfloat16, not {dtype}"
    reason = why_not_fp8(torch.cuda.get_device_capability(device), torch.__version__)
    if reason:
        return reason
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"needs Triton: {error}"
    return ""
