"""Time of attention alone, by FlashInfer's kernels: decodes beside a chunk, by one call and by two;
chunks, by fa3 and by fa2."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.gpu.checks import Row
from engine.attention.base import Segment
from engine.attention.flashinfer_backend import FlashInferAttention
from engine.attention.pool_layers import PoolLayers
from engine.gpu.tuning import MixedStep, measure_mixed, time_attention

MIXED_STEPS = (
    MixedStep(16, 1024, 512),
    MixedStep(32, 1024, 2048),
    MixedStep(128, 1024, 512),
    MixedStep(32, 8192, 2048),
)


CHUNKS = ((512, 512), (512, 8192), (2048, 2048), (8192, 8192))
"""Tokens of a chunk and of its context."""


def check_kernels(
    attention: FlashInferAttention,
    other: FlashInferAttention,
    layers: PoolLayers,
    chunks: Sequence[tuple[int, int]] = CHUNKS,
) -> Iterator[Row]:
    """Time of chunks with the other kernel, divided by that with the chosen one."""
    for chunk, context in chunks:
        num_blocks = -(-context // layers.block_size)
        segment = Segment(chunk, context, range(num_blocks))
        spent_s = [time_attention(each, layers, [segment]) for each in (attention, other)]
        yield Row(
            "mixed",
            f"chunk of {chunk} in {context}: the other kernel's time over the chosen one's",
            spent_s[1] / spent_s[0],
            "x",
            note=f"{1e3 * spent_s[1]:.3f} against {1e3 * spent_s[0]:.3f} ms",
        )


def check_mixed(
    attention: FlashInferAttention, layers: PoolLayers, steps: Sequence[MixedStep]
) -> Iterator[Row]:
    """Time of two calls divided by that of one: above 1, one call is faster."""
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
