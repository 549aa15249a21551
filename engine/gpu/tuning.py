"""Measures once, at the start, which attention kernels are faster on this card.

Chunks use fa3 or fa2. Decodes beside a chunk take either two calls, one after the other, each with
the kernel that suits it, or one joint call. The joint call pads the decodes to the chunk's tiles,
and with fa3 computes each decode's context on one multiprocessor. Which is faster depends on the
card, the heads and the sizes, so a typical step is run both ways. Results differ only in rounding.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.attention.base import Segment
from engine.attention.flashinfer_attention import FlashInferAttention
from engine.attention.pool_layers import PoolLayers
from engine.device import wait_for

logger = logging.getLogger(__name__)

_WARM_UPS = 2
_TIMES = 3


@dataclass(frozen=True)
class MixedStep:
    """Decodes of `context` tokens each beside one chunk of a prompt."""

    num_decodes: int
    context: int
    chunk: int

    @classmethod
    def typical(cls, max_sequences: int, max_chunk: int, max_context: int) -> MixedStep:
        """Half of a full batch, with contexts of medium length, beside a large chunk."""
        context = max(2, min(2048, max_context // 2))
        return cls(max(1, max_sequences // 2), context, max(2, min(max_chunk, context)))

    def segments(self, block_size: int, num_blocks: int) -> list[Segment]:
        """The step over a pool of `num_blocks`; if the pool is too small, block numbers wrap around
        to its start."""
        lengths = [(1, self.context)] * self.num_decodes + [(self.chunk, self.chunk)]
        segments, first = [], 0
        for query, context in lengths:
            count = -(-context // block_size)
            table = [(first + i) % num_blocks for i in range(count)]
            segments.append(Segment(query, context, table))
            first += count
        return segments


@dataclass(frozen=True)
class MixedTimes:
    """Seconds of attention in a mixed step, for the plan and all layers."""

    one_call: float
    two_calls: float


@torch.inference_mode()
def measure_mixed(
    attention: FlashInferAttention, layers: PoolLayers, step: MixedStep
) -> MixedTimes:
    """Time both ways and leave `attention` set to the faster one; only reads the pool."""
    segments = step.segments(layers.block_size, len(layers.caches[0][0]))
    seconds = {}
    for joined in (True, False):
        attention.joins_mixed = joined
        seconds[joined] = time_attention(attention, layers, segments)
    attention.joins_mixed = seconds[True] < seconds[False]
    return MixedTimes(seconds[True], seconds[False])


def time_attention(
    attention: FlashInferAttention, layers: PoolLayers, segments: Sequence[Segment]
) -> float:
    """Seconds for a plan and all layers; only reads the pool."""
    num_tokens = sum(segment.query_len for segment in segments)
    shape = (num_tokens, layers.num_heads, layers.head_dim)
    q = torch.zeros(shape, dtype=layers.dtype, device=layers.device)

    def run() -> None:
        attention.plan(segments)
        for layer in range(len(layers.caches)):
            attention.attend(layer, q)

    return _least(run, layers.device)


def faster_chunks(
    candidates: Sequence[FlashInferAttention], layers: PoolLayers, step: MixedStep
) -> FlashInferAttention:
    """The fastest candidate for the step's chunk alone; logs the times."""
    table = [block % len(layers.caches[0][0]) for block in range(step.chunk)]
    segment = Segment(step.chunk, step.chunk, table)
    spans = {
        candidate.choice.prefill: time_attention(candidate, layers, [segment])
        for candidate in candidates
    }
    said = ", ".join(f"{1e3 * span:.2f} ms by {name}" for name, span in spans.items())
    logger.info("attention of a chunk of %d: %s", step.chunk, said)
    return min(candidates, key=lambda candidate: spans[candidate.choice.prefill])


def choose_mixed(attention: FlashInferAttention, layers: PoolLayers, step: MixedStep) -> None:
    """Time both ways, and log which was chosen."""
    times = measure_mixed(attention, layers, step)
    logger.info(
        "attention of %d decodes of %d tokens beside a chunk of %d: %.2f ms by one call, %.2f ms "
        "by two; mixed steps take %s",
        step.num_decodes,
        step.context,
        step.chunk,
        1e3 * times.one_call,
        1e3 * times.two_calls,
        "one" if attention.joins_mixed else "two",
    )


def _least(run: Callable[[], None], device: torch.device) -> float:
    """The shortest of several runs, in seconds: other work on the card only adds time."""
    spans = []
    for _ in range(_WARM_UPS + _TIMES):
        wait_for(device)
        started = time.perf_counter()
        run()
        wait_for(device)
        spans.append(time.perf_counter() - started)
    return min(spans[_WARM_UPS:])
