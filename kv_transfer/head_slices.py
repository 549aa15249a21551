"""Maps the bytes of a block between workers whose ranks hold different parts of it.

Each rank of a worker has a part of every block: `[layers of its stage, planes, heads of the rank,
block_size, head_dim]`, contiguous (`KvLayout`). The layers that two ranks share are one contiguous
piece if both hold the same heads; else the heads that they share are one piece per layer and plane
(keys, values), at a fixed stride on each side. No data has to be staged or transposed. Pure
arithmetic; moves no data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
        if min(self.size, self.count) < 1 or self.start < 0 or end > self.block_bytes:
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

    def pieces(self) -> Iterator[tuple[int, int]]:
        """(offset in the source block, offset in the target block) of each piece."""
        yield from zip(self.source.offsets(), self.target.offsets(), strict=True)


@dataclass(frozen=True)
class Share:
    """What rank `source` of one worker and rank `target` of another share of each block."""

    source: int
    target: int
    slices: HeadSlices

    @property
    def is_whole(self) -> bool:
        """Whether both ranks' parts of a block are copied whole."""
        pieces = self.slices.source
        return pieces.size == pieces.block_bytes == self.slices.target.block_bytes


def whole_shares(block_bytes: Sequence[int], used: Sequence[int] = ()) -> tuple[Share, ...]:
    """The shares of two workers with the same ranks. `block_bytes`: of a block, by rank; of which
    the first `used` are copied, empty: all."""
    wholes = [Pieces(*each) for each in zip(block_bytes, used or block_bytes, strict=True)]
    return tuple(Share(rank, rank, HeadSlices(each, each)) for rank, each in enumerate(wholes))


def plan_shares(source: KvLayout, target: KvLayout) -> tuple[Share, ...]:
    """The shares of two workers, of which any rank's layout is given; each byte of a target's block
    is in one share. Raises ConfigError if the two are not of one model's cache."""
    for layout in (source, target):
        layout.check_ranks()
    shares = []
    for theirs in target.ranks:
        for ours in source.ranks:
            slices = plan_head_slices(ours, theirs) if sends(ours, theirs) else None
            if slices is not None:
                shares.append(Share(ours.rank, theirs.rank, slices))
    return tuple(shares)


def sends(source: KvLayout, target: KvLayout) -> bool:
    """Whether rank `source` is the one that sends to `target`, among the ranks with copies of its
    head. Neighbours of the target get theirs from other copies."""
    return source.tp_rank % source.num_copies == target.tp_rank % source.num_copies


def plan_head_slices(source: KvLayout, target: KvLayout) -> HeadSlices | None:
    """The pieces that rank `source` has for rank `target`; None if they share nothing.

    Raises ConfigError if the two are not ranks of one model's cache.
    """
    if source.unsharded != target.unsharded:
        raise ConfigError(
            "the two pools differ in more than their ranks: "
            f"{source.unsharded} and {target.unsharded}"
        )
    layers = _common(source.layers, target.layers)
    heads = _common(source.heads, target.heads)
    if not layers or not heads:
        return None
    is_joined = source.heads == target.heads
    return HeadSlices(*(_pieces(each, layers, heads, is_joined) for each in (source, target)))


def _common(one: range, other: range) -> range:
    first = max(one.start, other.start)
    return range(first, max(first, min(one.stop, other.stop)))


def _pieces(layout: KvLayout, layers: range, heads: range, is_joined: bool) -> Pieces:
    """The pieces of a rank's block that hold these layers and heads: one if it `is_joined`, that
    is, has all heads of the rank, otherwise one per layer and plane."""
    head_bytes = layout.block_size * layout.head_dim * KV_DTYPE_BYTES[layout.dtype]
    plane_bytes = len(layout.heads) * head_bytes
    layer_bytes = layout.num_planes * plane_bytes
    start = (layers.start - layout.layers.start) * layer_bytes
    if is_joined:
        return Pieces(layout.block_bytes, len(layers) * layer_bytes, start=start)
    return Pieces(
        layout.block_bytes,
        size=len(heads) * head_bytes,
        count=layout.num_planes * len(layers),
        start=start + (heads.start - layout.heads.start) * head_bytes,
        stride=plane_bytes,
    )
