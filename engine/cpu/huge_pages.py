"""Host memory in huge pages, where the system supports them.

A step reads hundreds of megabytes of scattered weights and KV. With pages of 4 KiB the cores
translate an address for every 64 cache lines, in a virtual machine twice. Linux backs memory with
pages of 2 MiB if the program requests them with `madvise` (its default; root can change it in
/sys/kernel/mm/transparent_hugepage). Elsewhere this is plain memory.
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
    """Like `torch.zeros` on the CPU, in a separate mapping; pages are allocated on first write."""
    return _view(_map(math.prod(shape) * dtype.itemsize), 0, shape, dtype)


class HugePages:
    """Packs tensors into a few large mappings, so that small tensors also share huge pages.

    For long-lived tensors: a mapping is freed once all its tensors are gone.
    """

    def __init__(self) -> None:
        self._mapping: mmap.mmap | None = None
        self._end = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Like `torch.empty` on the CPU, aligned to 64 bytes."""
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
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _view(
    mapping: mmap.mmap, offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mapping, dtype=dtype, count=count, offset=offset).view(shape)
