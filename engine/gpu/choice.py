"""Chooses the backend of a model on a card, as the settings ask and the machine allows."""

from __future__ import annotations

import importlib
import logging

import torch

from engine.attention.flashinfer_backend import FlashInferUnavailable
from engine.checkpoint.config import ModelConfig
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
    if settings.batch_invariant:
        _check_invariant(settings)
    kv_dtype = kv_torch_dtype(_kv_dtype(settings, device, dtype))
    _check_quantization(settings, config)
    weight_bits = _weight_bits(settings.weights, device, dtype)
    computed = torch_dtype(dtype)
    if settings.batch_invariant:
        return InvariantBackend(config, device, computed, kv_dtype)
    if settings.attention != "torch":
        try:
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


def _check_quantization(settings: EngineConfig, config: ModelConfig) -> None:
    """Raises ConfigError for quantized weights that no kernel of a card multiplies as they are."""
    if config.quantization is not None and settings.weights == "auto":
        raise ConfigError(
            f"weights is 'auto', but no kernel of a card multiplies {config.quantization.method} "
            "weights; use exact16, which dequantizes them at load"
        )


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
    if dtype != "bfloat16":
        raise ConfigError(f"weights fp8 needs dtype bfloat16, not {dtype}; use auto")
    reason = why_not_fp8(torch.cuda.get_device_capability(device), torch.__version__)
    if reason:
        raise ConfigError(f"weights fp8 {reason}; use auto")
    try:
        importlib.import_module("triton")
    except ImportError as error:
        raise ConfigError(f"weights fp8 needs Triton: {error}") from error
    return 8
