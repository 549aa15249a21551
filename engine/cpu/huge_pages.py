"""Host memory in huge pages, where the system lends them to those who ask.

A step reads hundreds of megabytes of weights and KV from all over: with pages of 4 KiB the cores
look up an address for every 64 cache lines, in a virtual machine twice. Linux gives pages of 2 MiB
to memory that asks (`madvise`; as it comes, or as root's settings in
/sys/kernel/mm/transparent_hugepage want); elsewhere this is plain memory.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

_HUGE = 1 << 21
_MAPPING = 16 * _HUGE
_ALIGNMENT = 64


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """As `torch.zeros` on the CPU, in a mapping of its own; pages come when they are written."""
    return _view(_map(math.prod(shape) * dtype.itemsize), 0, shape, dtype)


class HugePages:
    """Tensors side by side in few large mappings, so that small ones share pages, too.

    For tensors that stay: memory is given back when all that lie in a mapping are gone.
    """

    def __init__(self) -> None:
        self._mapping: mmap.mmap | None = None
        self._end = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As `torch.empty` on the CPU, at a multiple of 64 bytes."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._mapping is None or self._end + num_bytes > len(self._mapping):
            self._mapping, self._end = _map(max(num_bytes, _MAPPING)), 0
        tensor = _view(self._mapping, self._end, shape, dtype)
        self._end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return tensor


def _map(num_bytes: int) -> mmap.mmap:
    size = -(-max(num_bytes, 1) // _HUGE) * _HUGE
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _view(
    mapping: mmap.mmap, offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mapping, dtype=dtype, count=count, offset=offset).view(shape)
