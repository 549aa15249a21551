"""Which settings go together with `batch_invariant`, which makes the results of a sequence
independent of what else is in its steps.

On a card the mode takes kernels of its own (`engine.gpu.invariant_backend`). On a CPU our own
kernels are batch-invariant already, so nothing changes there; torch's products are not.
"""

from __future__ import annotations

from protocol.errors import ConfigError


def check_card_settings(attention: str, weights: str) -> None:
    """Raises ConfigError for settings that the card's batch-invariant kernels do not support."""
    if attention != "auto":
        computes = "FlashInfer" if attention == "kernel" else "torch"
        raise ConfigError(
            f"attention is {attention!r}, but on a card {computes}'s results depend on the batch; "
            "with batch_invariant use auto"
        )
    if weights == "fp8":
        raise ConfigError(
            "weights is 'fp8', but its products depend on the batch; with batch_invariant use auto"
        )


def check_cpu_kernels(dtype: str, has_kernels: bool) -> None:
    """Raises ConfigError unless our own kernels compute products and attention on this CPU."""
    if not has_kernels:
        raise ConfigError(
            "batch_invariant on a CPU needs our own kernels for products and attention: dtype "
            f"bfloat16 (not {dtype}), attention auto or kernel, an even head_dim, and AVX2 or more"
        )
