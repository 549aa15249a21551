"""The states of layers that keep one per sequence instead of keys and values, in slots of the pool.

A slot holds the states of all these layers. A step reads a sequence's state from one slot and
writes the new state to another (`scheduling.states.step`). Each write fills its slot's part of a
layer, so that nothing is read that was not written. Knows nothing of what layers compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from engine.attention.base import Segment
from engine.kv_pool import KvPool


class Piece(NamedTuple):
    """Rows of a batch, `start` to `end` - 1, that take a sequence from one state to the next; if
    `read` is None, they are the sequence's first rows and begin with an empty state."""

    start: int
    end: int
    read: int | None
    write: int


@dataclass
class StatePlan:
    """A batch's work on states: `pieces` in their order, and the `rows` of sequences that have one
    token and a state, with the slots that they read and write."""

    pieces: list[Piece] = field(default_factory=list)
    rows: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    reads: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    writes: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))


class LayerStates(NamedTuple):
    """One layer's share of all slots, [num_slots, parts, numbers of a part], fp32, strided; and the
    batch's plan."""

    slots: torch.Tensor
    plan: StatePlan


class StateSlots:
    """`AttentionBackend` over the slots of a pool; its `layer` arguments count only the layers with
    states."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._plan = StatePlan()

    def plan(self, segments: Sequence[Segment]) -> None:
        """See AttentionBackend."""
        pieces: list[Piece] = []
        singles: list[tuple[int, int, int]] = []
        start = 0
        for segment in segments:
            step = segment.states
            assert step is not None, "the sequence has no slots"
            if segment.query_len == 1 and step.read is not None:
                singles.append((start, step.read, step.writes[0][1]))
            else:
                read, first = step.read, start
                for num_tokens, slot in step.writes:
                    pieces.append(Piece(first, start + num_tokens, read, slot))
                    read, first = slot, start + num_tokens
            start += segment.query_len
        columns = torch.tensor(singles, dtype=torch.int64).reshape(-1, 3).unbind(1)
        self._plan = StatePlan(pieces, *columns)

    def of_layer(self, layer: int) -> LayerStates:
        """The states of a layer."""
        return LayerStates(self._pool.layer(layer)[:, 0, :, 0], self._plan)
