"""Attention of a mixed step, decodes beside a chunk of a prompt, by one call and by two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.gpu_checks import Row
from engine.attention.flashinfer_backend import FlashInferAttention, PoolLayers
from engine.gpu.mixed import MixedStep, measure_mixed

MIXED_STEPS = (
    MixedStep(16, 1024, 512),
    MixedStep(32, 1024, 2048),
    MixedStep(128, 1024, 512),
    MixedStep(32, 8192, 2048),
)


def check_mixed(
    attention: FlashInferAttention, layers: PoolLayers, steps: Sequence[MixedStep]
) -> Iterator[Row]:
    """Time of two calls over that of one: above 1, one is faster."""
    for step in steps:
        times = measure_mixed(attention, layers, step)
        yield Row(
            "mixed",
            f"{step.num_decodes} decodes of {step.context} beside a chunk of {step.chunk}: "
            "two calls over one",
            times.two_calls / times.one_call,
            "x",
            note=f"{1e3 * times.two_calls:.3f} against {1e3 * times.one_call:.3f} ms, "
            f"{len(layers.caches)} layers, plans included",
        )
