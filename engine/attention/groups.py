"""Attention of a model whose layers are in several groups, each with blocks of its own.

Each group has a backend over its view of the pool, which sees the group's layers only, and gets the
group's block tables.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch

from engine.attention.base import (
    AttentionBackend,
    GroupedBackend,
    KvTarget,
    Segment,
    StoringAttention,
)
from engine.attention.cpu_attention import KernelAttention, KernelPlace
from engine.attention.states import LayerStates, StateSlots
from engine.kv_pool import KvPool


class AttentionByGroup:
    """`GroupedBackend` over the backends of all groups that have layers here; `layers[g]` are those
    of group g."""

    def __init__(
        self, backends: Sequence[GroupedBackend], layers: Mapping[int, Sequence[int]]
    ) -> None:
        self.backends = tuple(backends)
        self._groups = tuple(layers)
        self.places = {
            layer: (number, index)
            for number, members in enumerate(layers.values())
            for index, layer in enumerate(members)
        }
        """For each layer, the number of its backend, and its own among the layers of its group."""

    def plan(self, segments: Sequence[Segment]) -> None:
        """See AttentionBackend."""
        for group, backend in zip(self._groups, self.backends, strict=True):
            backend.plan([segment.of_group(group) for segment in segments])

    def run(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See GroupedBackend."""
        number, index = self.places[layer]
        return self.backends[number].run(index, q, k, v, sinks)


class AttentionWithStates(AttentionByGroup):
    """`GroupedBackend` of a model in which some layers keep a state instead of keys and values."""

    def states(self, layer: int) -> LayerStates:
        """The states of a layer that keeps one per sequence."""
        number, index = self.places[layer]
        backend: object = self.backends[number]
        assert isinstance(backend, StateSlots)
        return backend.of_layer(index)


class StoringByGroup(AttentionByGroup):
    """`StoringAttention` over the backends of all groups, which store and attend, too."""

    def target(self, layer: int) -> KvTarget:
        """See StoringAttention."""
        backend, index = self._place(layer)
        return backend.target(index)

    def attend(
        self, layer: int, q: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See StoringAttention."""
        backend, index = self._place(layer)
        return backend.attend(index, q, sinks)

    def _place(self, layer: int) -> tuple[StoringAttention, int]:
        number, index = self.places[layer]
        backend = self.backends[number]
        assert isinstance(backend, StoringAttention)
        return backend, index


class KernelsByGroup(AttentionByGroup):
    """The kernels' attention of all groups; offers the plans of all of them to a fused step, as
    `KernelAttention` does for one."""

    def __init__(
        self, backends: Sequence[GroupedBackend], layers: Mapping[int, Sequence[int]]
    ) -> None:
        super().__init__(backends, layers)
        self._kernels = [each for each in backends if isinstance(each, KernelAttention)]
        assert len(self._kernels) == len(backends)
        self._last = self._kernels[self.places[max(self.places)][0]]

    @property
    def longest(self) -> int:
        """See KernelAttention."""
        return self._last.longest

    @property
    def plans(self) -> list[ctypes.Structure]:
        """See KernelAttention."""
        return [plan for each in self._kernels for plan in each.plans]

    def place(self, layer: int) -> KernelPlace:
        """See KernelAttention."""
        number, index = self.places[layer]
        place = self._kernels[number].place(index)
        before = sum(each.num_plans for each in self._kernels[:number])
        return place._replace(plan=before + place.plan)

    @property
    def planned_last(self) -> ctypes.Structure | None:
        """See KernelAttention."""
        return self._last.planned_last


FusedAttention = KernelAttention | KernelsByGroup
"""The attention that a fused step may run over."""


def by_group(pool: KvPool, make: Callable[[KvPool], AttentionBackend]) -> AttentionBackend:
    """Attention over `pool`. With one group, this is the result of `make` for the pool; with
    several, `make` is called for the view of each group that has layers on this rank, and the
    results are joined."""
    return joined(pool, [make(view) for view in pool.groups if view.model_layers])


def joined(pool: KvPool, backends: Sequence[AttentionBackend]) -> AttentionBackend:
    """One backend for the groups of a pool that have layers, made of their `backends`. A fused step
    and captured graphs run over it if they run over each of these."""
    if len(pool.groups) == 1:
        return backends[0]
    views = enumerate(view.model_layers for view in pool.groups)
    layers = {group: members for group, members in views if members}
    grouped = [cast(GroupedBackend, each) for each in backends]  # latents have no windows
    if any(isinstance(each, StateSlots) for each in backends):
        return AttentionWithStates(grouped, layers)
    if all(isinstance(each, KernelAttention) for each in backends):
        return KernelsByGroup(grouped, layers)
    if all(isinstance(each, StoringAttention) for each in backends):
        return StoringByGroup(grouped, layers)
    return AttentionByGroup(grouped, layers)
