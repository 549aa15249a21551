"""Which bytes of a block go where between pools of different tensor-parallel size.

A block is `[num_layers, 2, heads of the rank, block_size, head_dim]`, contiguous, and rank r of n
holds the heads `r * H / n` to `(r + 1) * H / n`. So what two ranks share is one contiguous piece
per layer and half (keys, values), at a fixed stride on each side: nothing has to be staged or
transposed. Pure arithmetic; moves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from protocol.errors import ConfigError
from protocol.layout import KV_DTYPE_BYTES, KvLayout


@dataclass(frozen=True)
class HeadSlices:
    """`count` pieces of `size` bytes in each block, the same distance apart on either side."""

    size: int
    count: int
    source_start: int  # bytes from the start of a source block
    source_stride: int
    target_start: int
    target_stride: int

    def pieces(self) -> Iterator[tuple[int, int]]:
        """(offset in the source block, offset in the target block) of each piece."""
        for index in range(self.count):
            yield (
                self.source_start + index * self.source_stride,
                self.target_start + index * self.target_stride,
            )


def plan_head_slices(source: KvLayout, target: KvLayout) -> HeadSlices | None:
    """What rank `source` has for rank `target`; None where they share no head.

    Raises ConfigError where the two are not ranks of one model's cache.
    """
    if _unsharded(source) != _unsharded(target):
        raise ConfigError(
            "the two pools differ in more than their tensor-parallel size: "
            f"{_unsharded(source)} and {_unsharded(target)}"
        )
    source_first, target_first = _first_head(source), _first_head(target)
    first = max(source_first, target_first)
    end = min(source_first + source.num_kv_heads, target_first + target.num_kv_heads)
    if first >= end:
        return None
    head_bytes = source.block_size * source.head_dim * KV_DTYPE_BYTES[source.dtype]
    size, count = (end - first) * head_bytes, 2 * source.num_layers
    source_stride, target_stride = (layout.num_kv_heads * head_bytes for layout in (source, target))
    if size == source_stride == target_stride:  # whole blocks: one piece
        size, count = size * count, 1
    return HeadSlices(
        size,
        count,
        (first - source_first) * head_bytes,
        source_stride,
        (first - target_first) * head_bytes,
        target_stride,
    )


def _first_head(layout: KvLayout) -> int:
    return layout.tp_rank * layout.num_kv_heads


def _unsharded(layout: KvLayout) -> tuple[str, str, int, int, int, int]:
    """What ranks of one cache have in common; the fourth are all of its heads."""
    return (
        layout.model_fingerprint,
        layout.dtype,
        layout.num_layers,
        layout.num_kv_heads * layout.tp_size,
        layout.block_size,
        layout.head_dim,
    )
