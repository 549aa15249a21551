"""Where the parts of a block lie: the order of layers, heads and planes within it.

A rank's part of a block is in one of two orders:

- layer by layer, `[layers, planes, heads, block_size, head_dim]`;
- with `KvLayout.peer_stages`, head by head within each cell, `[heads, layers of the cell, planes,
  block_size, head_dim]`, one cell after the other. Cells are the layers that a stage of this cache
  and a stage of the peers' have in common. A rank of a peer shares with this rank some heads of one
  cell, which are one piece of memory on both sides, however many heads each has.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from protocol.layout import KvLayout, stage_layers


class LayerPlace(NamedTuple):
    """Where one layer lies in a block, in numbers: where its first head's keys begin, and the
    distances to the next plane and to the next head. A head's part of a plane is contiguous."""

    start: int
    plane_stride: int
    head_stride: int


def layer_places(layout: KvLayout) -> tuple[LayerPlace, ...]:
    """The places of a rank's layers, in their order."""
    head, num_heads = layout.block_size * layout.head_dim, len(layout.heads)
    places: list[LayerPlace] = []
    if not layout.peer_stages:
        plane = num_heads * head
        layer = layout.num_planes * plane
        return tuple(LayerPlace(index * layer, plane, head) for index in range(len(layout.layers)))
    layer = layout.num_planes * head
    for cell in cells(layout):
        start = len(places) * num_heads * layer
        places += [
            LayerPlace(start + index * layer, head, len(cell) * layer) for index in range(len(cell))
        ]
    return tuple(places)


def cells(layout: KvLayout) -> list[range]:
    """A rank's layers, cut where the peers' stages end."""
    own, count = layout.layers, layout.peer_stages
    ends = layout.peer_ends or [
        stage_layers(layout.num_layers, stage, count).stop for stage in range(count)
    ]
    cuts = [own.start, *(end for end in ends if own.start < end < own.stop), own.stop]
    return [range(*each) for each in pairwise(cuts)]
