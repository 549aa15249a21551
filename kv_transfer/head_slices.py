"""Maps the bytes of a block between workers of different tensor-parallel size.

Each rank of a worker has a part of every block: `[num_layers, num_planes, heads of the rank,
block_size, head_dim]`, contiguous, and rank r of n holds the heads `r * H / n` to
`(r + 1) * H / n`. The heads that two ranks share are therefore one contiguous piece per layer and
plane (keys, values), at a fixed stride on each side: no data has to be staged or transposed. Pure
arithmetic; moves no data.
"""

from __future__ import annotations

from collections.abc import Iterator
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

    @staticmethod
    def whole(block_bytes: int) -> Pieces:
        """A block as one piece."""
        return Pieces(block_bytes, block_bytes)

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


def whole_shares(block_bytes: int, num_ranks: int) -> tuple[Share, ...]:
    """The shares of two workers with the same ranks."""
    whole = Pieces.whole(block_bytes)
    return tuple(Share(rank, rank, HeadSlices(whole, whole)) for rank in range(num_ranks))


def plan_shares(source: KvLayout, target: KvLayout) -> tuple[Share, ...]:
    """The shares of two workers, of which any rank's layout is given; each byte of a target's block
    is in one share. Raises ConfigError if the two are not of one model's cache."""
    shares = []
    for theirs in _ranks(target):
        for ours in _ranks(source):
            slices = plan_head_slices(ours, theirs)
            if slices is not None:
                shares.append(Share(ours.tp_rank, theirs.tp_rank, slices))
    return tuple(shares)


def _ranks(layout: KvLayout) -> list[KvLayout]:
    whole, size = layout.unsharded, layout.tp_size
    return [layout] if size == 1 else [whole.shard(rank, size) for rank in range(size)]


def shared_heads(source: KvLayout, target: KvLayout) -> range:
    """The cache's heads that both ranks hold; there may be none.

    Raises ConfigError if the two are not ranks of one model's cache.
    """
    if source.unsharded != target.unsharded:
        raise ConfigError(
            "the two pools differ in more than their tensor-parallel size: "
            f"{source.unsharded} and {target.unsharded}"
        )
    first = max(source.heads.start, target.heads.start)
    return range(first, max(first, min(source.heads.stop, target.heads.stop)))


def plan_head_slices(source: KvLayout, target: KvLayout) -> HeadSlices | None:
    """The pieces that rank `source` sends to rank `target`; None if they share no head.

    Raises ConfigError if the two are not ranks of one model's cache.
    """
    heads = shared_heads(source, target)
    if not heads:
        return None
    if len(heads) == source.num_kv_heads == target.num_kv_heads:
        whole = Pieces.whole(source.block_bytes)
        return HeadSlices(whole, whole)
    return HeadSlices(_pieces(source, heads), _pieces(target, heads))


def _pieces(layout: KvLayout, heads: range) -> Pieces:
    """The pieces of a rank's block that hold these heads: one per layer and plane."""
    head_bytes = layout.block_size * layout.head_dim * KV_DTYPE_BYTES[layout.dtype]
    return Pieces(
        layout.block_bytes,
        size=len(heads) * head_bytes,
        count=layout.num_planes * layout.num_layers,
        start=(heads.start - layout.heads.start) * head_bytes,
        stride=layout.num_kv_heads * head_bytes,
    )
