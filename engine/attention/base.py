"""The interface between the model and the backends that compute attention over the paged KV pool.

A backend is bound to one pool. Per batch, call `plan` once, then `run` once per layer, in order.
A batch's tokens are those of its segments, one segment after the other. `engine.attention.latents`
has the interface for latents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import msgspec
import torch

from scheduling.states.step import StateStep


class Segment(msgspec.Struct, frozen=True, gc=False):
    """The tokens of one sequence in a batch.

    `query_len` tokens are computed now; `context_len` counts them and all tokens before them.
    The layers' output is wanted for the last `num_wanted` tokens (None: for all); the others only
    store their keys and values. `block_table[i - first_block]` is the pool block of positions
    `i * block_size` to `(i + 1) * block_size - 1`; entries beyond the context do not matter. The
    table has no entries for earlier blocks, which no query sees.

    `others` has, for each further group of layers, its `first_block` and its block table. `states`
    are the slots of layers that keep a state.
    """

    query_len: int
    context_len: int
    block_table: Sequence[int]
    num_wanted: int | None = None
    first_block: int = 0
    others: tuple[tuple[int, Sequence[int]], ...] = ()
    states: StateStep | None = None

    def __post_init__(self) -> None:
        assert 1 <= self.query_len <= self.context_len, (self.query_len, self.context_len)
        assert 0 <= self.wanted_len <= self.query_len, (self.num_wanted, self.query_len)

    @property
    def wanted_len(self) -> int:
        """How many of the segment's last tokens are wanted."""
        return self.query_len if self.num_wanted is None else self.num_wanted

    def of_group(self, index: int) -> Segment:
        """The segment as layers of one group see it. A segment without `others` has the same block
        numbers in every group."""
        if index == 0 or not self.others:
            return self
        first_block, table = self.others[index - 1]
        return Segment(
            self.query_len,
            self.context_len,
            table,
            self.num_wanted,
            first_block,
            states=self.states,
        )


def wanted_rows(segments: Sequence[Segment]) -> list[int] | None:
    """The wanted rows of a batch, ascending; None if all rows are wanted."""
    rows: list[int] = []
    end = 0
    for segment in segments:
        end += segment.query_len
        rows += range(end - segment.wanted_len, end)
    return None if len(rows) == end else rows


class AttentionBackend(Protocol):
    """Causal attention of a batch's tokens over their sequences' KV blocks, of any kind."""

    def plan(self, segments: Sequence[Segment]) -> None:
        """Prepares the data that all layers share for one batch."""


class GroupedBackend(AttentionBackend, Protocol):
    """Attention of grouped queries."""

    def run(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes `k`, `v` to the pool, then attends.

        `q` is [N, num_heads, head_dim], `k` and `v` are [N, num_kv_heads, head_dim], with N the
        query tokens of all planned segments, in their order. If there are `sinks` [num_heads],
        fp32, each head's softmax has its sink as one more score, without a value. Returns [N,
        num_heads, head_dim].
        """


@dataclass(frozen=True)
class KvTarget:
    """Where to store a batch's keys and values in one layer, divided by the scales.

    `keys` and `values` are [num_blocks, num_kv_heads, block_size, head_dim] with equal strides;
    head_dim's stride is 1.
    """

    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor  # [N] int64: block * block_size + offset; negative: not stored
    k_scale: float = 1.0
    v_scale: float = 1.0


@runtime_checkable
class StoringAttention(GroupedBackend, Protocol):
    """A backend with separate calls to store and to attend, so that one kernel can rotate k and
    store it."""

    def target(self, layer: int) -> KvTarget:
        """Where to store the planned batch's k and v of `layer` before `attend`."""

    def attend(
        self, layer: int, q: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attends with `q` [N, num_heads, head_dim] to the stored KV; returns the same shape."""
