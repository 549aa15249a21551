"""Maps the bytes of a block between workers whose ranks hold different parts of it.

Each rank of a worker has a part of every block, in the order of its layout
(`protocol.block_order`). The bytes of a block that two ranks share form pieces. Each piece is as
large as the range that is contiguous on both sides: one piece if both hold the same heads, or if
each worker orders its blocks for the other's ranks. No data has to be staged or transposed. Layers
in groups have such pieces in the blocks of each group. Pure arithmetic; moves no data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from protocol.block_order import layer_places
from protocol.errors import ConfigError
from protocol.layout import KV_DTYPE_BYTES, KvLayout


@dataclass(frozen=True)
class Pieces:
    """`count` pieces of `size` bytes in each block of `block_bytes`: the first at `start`, then
    one every `stride` bytes. The default is one piece.

    Raises ValueError if a piece would extend past the block.
    """

    block_bytes: int
    size: int
    count: int = 1
    start: int = 0
    stride: int = 0

    def __post_init__(self) -> None:
        end = self.start + (self.count - 1) * self.stride + self.size
        is_positive = min(self.size, self.count) > 0 <= min(self.start, self.stride)
        if not is_positive or end > self.block_bytes:
            raise ValueError(f"{self} leaves its block")

    def offsets(self) -> range:
        """Offset of each piece within a block."""
        return range(self.start, self.start + self.count * (self.stride or 1), self.stride or 1)


@dataclass(frozen=True)
class HeadSlices:
    """The pieces that a source block and a target block share, as they lie on each side."""

    source: Pieces
    target: Pieces

    def __post_init__(self) -> None:
        if (self.source.size, self.source.count) != (self.target.size, self.target.count):
            raise ValueError(f"the pieces of {self} differ")

    def at_strides(self, source: int, target: int) -> HeadSlices:
        """The same pieces in pools whose blocks are so many bytes apart."""
        return HeadSlices(
            replace(self.source, block_bytes=source), replace(self.target, block_bytes=target)
        )

    def pieces(self) -> Iterator[tuple[int, int]]:
        """(offset in the source block, offset in the target block) of each piece."""
        yield from zip(self.source.offsets(), self.target.offsets(), strict=True)


@dataclass(frozen=True)
class Share:
    """The bytes of each block that rank `source` of one worker and rank `target` of another
    share. `num_targets` is the number of the target's ranks, where shares do not name all."""

    source: int
    target: int
    slices: HeadSlices
    num_targets: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether both ranks' parts of a block are copied whole."""
        pieces = self.slices.source
        return pieces.size == pieces.block_bytes == self.slices.target.block_bytes


def whole_shares(block_bytes: Sequence[int]) -> tuple[Share, ...]:
    """The shares of two workers with the same ranks; `block_bytes` has the size of a block on each
    rank."""
    wholes = [Pieces(size, size) for size in block_bytes]
    return tuple(Share(rank, rank, HeadSlices(each, each)) for rank, each in enumerate(wholes))


def plan_shares(source: KvLayout, target: KvLayout) -> tuple[tuple[Share, ...], ...]:
    """The shares of two workers, by group of layers. `source` and `target` are the layouts of any
    of their ranks. Each byte of a target's block is in one share. Raises ConfigError if the two are
    not of one model's cache."""
    for layout in (source, target):
        layout.check_ranks()
    if source.unsharded != target.unsharded:
        raise ConfigError(
            "the two pools differ in more than their ranks: "
            f"{source.unsharded} and {target.unsharded}"
        )
    return tuple(_shares_of(group, source, target) for group in range(len(source.groups)))


def _shares_of(group: int, source: KvLayout, target: KvLayout) -> tuple[Share, ...]:
    """The shares of the blocks of one group, as they lie in the pools."""
    ours, theirs = _parts_of(group, source), _parts_of(group, target)
    return tuple(
        Share(writer.rank, reader.rank, slices.at_strides(source_stride, target_stride))
        for reader, target_stride in theirs
        for writer, source_stride in ours
        if sends(writer, reader)
        for slices in plan_head_slices(writer, reader)
    )


def num_pieces(shares: Sequence[Share]) -> dict[tuple[int, int], int]:
    """How many pieces of a block each pair of ranks (source, target) has."""
    counts: dict[tuple[int, int], int] = {}
    for share in shares:
        pair = share.source, share.target
        counts[pair] = counts.get(pair, 0) + share.slices.source.count
    return counts


def _parts_of(group: int, layout: KvLayout) -> list[tuple[KvLayout, int]]:
    """For each rank, the layout of its part of a group's blocks, and the distance of two blocks in
    its pool."""
    return [(rank.of_group(group), rank.block_stride(group)) for rank in layout.ranks]


def sends(source: KvLayout, target: KvLayout) -> bool:
    """Whether rank `source` sends its head to `target`. If several ranks have copies of a head,
    each sends to other targets."""
    return source.tp_rank % source.num_copies == target.tp_rank % source.num_copies


def plan_head_slices(source: KvLayout, target: KvLayout) -> tuple[HeadSlices, ...]:
    """The pieces that rank `source` has for rank `target`, as series; none if the ranks share
    nothing. Both layouts are of one cache without groups."""
    layers = _common(source.layers, target.layers)
    heads = _common(source.heads, target.heads)
    if not layers or not heads:
        return ()
    offsets = np.stack([_head_offsets(each, layers, heads) for each in (source, target)])
    head_bytes = source.block_size * source.head_dim * KV_DTYPE_BYTES[source.dtype]
    block_bytes = source.block_bytes, target.block_bytes
    orders = (offsets[:, np.argsort(side)] for side in offsets)
    found = [_series(block_bytes, *_joined(each, head_bytes)) for each in orders]
    return min(found, key=len)


def _common(one: range, other: range) -> range:
    first = max(one.start, other.start)
    return range(first, max(first, min(one.stop, other.stop)))


def _head_offsets(layout: KvLayout, layers: range, heads: range) -> np.ndarray:
    """The offsets in a rank's block, in bytes, of one head's part of one plane of one layer: for
    these layers and heads, and all planes."""
    own = slice(layers.start - layout.layers.start, layers.stop - layout.layers.start)
    places = np.array(layer_places(layout)[own])  # [layers, 3]
    starts, plane_strides, head_strides = places.T[:, :, None, None]
    planes = np.arange(layout.num_planes)[:, None]
    own_heads = np.array(heads) - layout.heads.start
    numbers: np.ndarray = starts + plane_strides * planes + head_strides * own_heads
    return numbers.reshape(-1) * KV_DTYPE_BYTES[layout.dtype]


def _joined(offsets: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Join parts of `size` bytes that are adjacent on both sides; `offsets` are [2, parts]. Returns
    the pieces' offsets, [2, pieces], and sizes."""
    begins = np.flatnonzero((np.diff(offsets) != size).any(axis=0)) + 1
    firsts = np.concatenate(([0], begins))
    return offsets[:, firsts], size * np.diff(firsts, append=offsets.shape[1])


def _series(
    block_bytes: tuple[int, int], offsets: np.ndarray, sizes: np.ndarray
) -> tuple[HeadSlices, ...]:
    """Pieces as series of equal size and at one distance on each side."""
    found = []
    first = 0
    steps = np.diff(offsets)
    while first < len(sizes):
        end = first + 1
        while (
            end < len(sizes)
            and sizes[end] == sizes[first]
            and (steps[:, end - 1] == steps[:, first]).all()
            and (steps[:, first] > 0).all()
        ):
            end += 1
        count = end - first
        strides = steps[:, first].tolist() if count > 1 else (0, 0)
        sides = zip(block_bytes, offsets[:, first].tolist(), strides, strict=True)
        size = int(sizes[first])
        found.append(HeadSlices(*(Pieces(each, size, count, *at) for each, *at in sides)))
        first = end
    return tuple(found)
