"""Memory of a card that another process can open by CUDA IPC: for the KV pool.

Torch's allocator makes such memory by default, but not with `expandable_segments:True` nor with
CUDA's asynchronous allocator. UCX then moves a handoff on one host through TCP without saying so,
some hundred times slower (https://github.com/openucx/ucx/issues/11548). So the pool is allocated
with expandable segments turned off, whatever the environment says, and the result is checked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

_EXPANDABLE = "expandable_segments"
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class CardAllocator(Protocol):
    """Torch's allocator for cards, as far as it matters here."""

    def settings(self) -> str:
        """The settings in force, as in PYTORCH_ALLOC_CONF."""

    def change(self, settings: str) -> None:
        """Replace the settings."""

    def backend(self) -> str:
        """`native` or `cudaMallocAsync`."""

    def segments(self) -> list[dict[str, Any]]:
        """The segments of memory, with `address`, `total_size` and `is_expandable`."""


class TorchAllocator:
    """See CardAllocator."""

    def settings(self) -> str:
        """See CardAllocator. torch before 2.13 does not report its settings, so the environment's
        are returned."""
        tell = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
        if tell is not None:
            return str(tell())
        return next((os.environ[name] for name in _VARIABLES if name in os.environ), "")

    def change(self, settings: str) -> None:
        """See CardAllocator."""
        torch._C._accelerator_setAllocatorSettings(settings)

    def backend(self) -> str:
        """See CardAllocator."""
        return str(torch.cuda.get_allocator_backend())

    def segments(self) -> list[dict[str, Any]]:
        """See CardAllocator."""
        return list(torch.cuda.memory_snapshot())


TORCH = TorchAllocator()


def shareable_zeros(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    allocator: CardAllocator = TORCH,
) -> torch.Tensor:
    """A zeroed tensor outside of expandable segments; `why_not_shareable` tells if that failed."""
    with _without_expandable_segments(allocator):
        return torch.zeros(tuple(shape), dtype=dtype, device=device)


def why_not_shareable(tensor: torch.Tensor, allocator: CardAllocator = TORCH) -> str:
    """Why no other process can open the memory of a tensor on a card; "" if one can."""
    backend = allocator.backend()
    if backend != "native":
        return f"torch allocates by {backend}: leave `backend` out of PYTORCH_ALLOC_CONF"
    address = tensor.data_ptr()
    for segment in allocator.segments():
        if segment["address"] <= address < segment["address"] + segment["total_size"]:
            is_expandable = segment.get("is_expandable", False)
            return "it lies in an expandable segment" if is_expandable else ""
    return "it is not in torch's memory"


@contextmanager
def _without_expandable_segments(allocator: CardAllocator) -> Iterator[None]:
    before = allocator.settings()
    if _EXPANDABLE not in before:  # off by default
        yield
        return
    others = [each for each in before.split(",") if _EXPANDABLE not in each]
    allocator.change(",".join([*others, f"{_EXPANDABLE}:False"]))
    try:
        yield
    finally:
        allocator.change(before)
