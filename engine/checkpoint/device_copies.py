"""Copies of weights to a device; to a card they go through two buffers of pinned memory.

From the mapped pages of a file, a copy to a card waits for every page and runs at a fraction of the
bus's speed. Through pinned memory, the card takes one buffer while the host fills the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from engine.device import fence_of
from engine.fences import PASSED, Fence

_BUFFER_BYTES = 16 << 20


class Copies(Protocol):
    """Copies tensors from host memory into places of the same shape, and of any dtype."""

    def copy(self, place: torch.Tensor, stored: torch.Tensor) -> None:
        """Start the copy; `stored` may change or go away afterwards."""

    def finish(self) -> None:
        """Wait for all copies."""


def copies_to(device: torch.device) -> Copies:
    """The fastest copies to `device`."""
    if device.type != "cuda":
        return DirectCopies()
    buffers = [torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    return StagedCopies(buffers, lambda: fence_of(device))


class DirectCopies:
    """See Copies; each copy ends before `copy` returns."""

    def copy(self, place: torch.Tensor, stored: torch.Tensor) -> None:
        """See Copies."""
        place.copy_(stored)

    def finish(self) -> None:
        """See Copies."""


class StagedCopies:
    """See Copies; uses `buffers` [bytes], uint8, in turn. `start` (place, source), if given, starts
    a copy; `fence` returns a fence behind all copies started so far."""

    def __init__(
        self,
        buffers: Sequence[torch.Tensor],
        fence: Callable[[], Fence],
        start: Callable[[torch.Tensor, torch.Tensor], object] | None = None,
    ) -> None:
        self._buffers = buffers
        self._fence = fence
        self._start = start or (lambda place, source: place.copy_(source, non_blocking=True))
        self._taken: list[Fence] = [PASSED] * len(buffers)  # each frees its buffer
        self._next = 0

    def copy(self, place: torch.Tensor, stored: torch.Tensor) -> None:
        """See Copies. A tensor larger than a buffer is copied in parts of whole rows."""
        row_bytes = max(stored[0].numel() * place.itemsize, 1) if len(stored) else 1
        rows = max(self._buffers[0].numel() // row_bytes, 1)
        if rows * row_bytes > self._buffers[0].numel():  # a row is larger than a buffer
            place.copy_(stored)
            return
        for source, target in zip(stored.split(rows), place.split(rows), strict=True):
            self._copy_part(target, source)

    def finish(self) -> None:
        """See Copies."""
        for fence in self._taken:
            fence.wait()

    def _copy_part(self, place: torch.Tensor, stored: torch.Tensor) -> None:
        number, self._next = self._next, (self._next + 1) % len(self._buffers)
        self._taken[number].wait()
        staged = self._buffers[number][: place.numel() * place.itemsize].view(place.dtype)
        staged = staged.view(place.shape)
        staged.copy_(stored)  # and casts
        self._start(place, staged)
        self._taken[number] = self._fence()
