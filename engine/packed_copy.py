"""Copies the small arrays of a step to a device by one copy.

A copy to a card costs its host several microseconds, however small it is. Each call takes fresh
memory from torch's allocator of pinned memory, which reuses memory only after the card has read it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.device import to_device

_ALIGNMENT = 16  # bytes: the widest load of a kernel, and no less than an item

Array = npt.NDArray[Any]


def on_device(arrays: Mapping[str, Array], device: torch.device) -> dict[str, torch.Tensor]:
    """The arrays on `device`; does not wait for a card. On a card they are aligned views of one
    piece of memory."""
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    if not arrays:
        return {}
    packed = to_device(pack(arrays.values()), device)
    return dict(zip(arrays, unpack(packed, arrays.values()), strict=True))


def pack(arrays: Collection[Array]) -> torch.Tensor:
    """The arrays one behind the other, each aligned: [num_bytes] uint8; not empty."""
    parts: list[bytes] = []
    for array in arrays:
        parts.append(array.tobytes())
        parts.append(bytes(-array.nbytes % _ALIGNMENT))
    together = bytearray(b"".join(parts))
    return torch.frombuffer(together or bytearray(_ALIGNMENT), dtype=torch.uint8)


def unpack(packed: torch.Tensor, arrays: Collection[Array]) -> list[torch.Tensor]:
    """Views of `packed`, the result of `pack` on any device, with the arrays' dtypes and shapes."""
    of_dtype: dict[np.dtype[Any], torch.Tensor] = {}
    views, start = [], 0
    for array in arrays:
        if array.dtype not in of_dtype:
            of_dtype[array.dtype] = packed.view(_DTYPES[array.dtype])
        first = start // array.itemsize
        view = of_dtype[array.dtype][first : first + array.size]
        views.append(view if array.ndim == 1 else view.view(array.shape))
        start += array.nbytes + -array.nbytes % _ALIGNMENT
    return views


_DTYPES = {
    np.dtype(name): getattr(torch, name)
    for name in ("bool", "uint8", "int32", "int64", "float32", "float64")
}
