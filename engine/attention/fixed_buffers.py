"""Arrays at fixed addresses on a device. Captured kernels read them, and each step fills them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

_ALIGNMENT = 512  # bytes, as for a separate allocation


class FixedBuffers:
    """Zeroed arrays, each given by its name, length and dtype. All lie in one piece of memory, so
    that a step needs one copy to fill them. A step may fill only the beginning of the last array.
    """

    def __init__(
        self, arrays: Sequence[tuple[str, int, torch.dtype]], device: torch.device
    ) -> None:
        self._spans: dict[str, tuple[int, int, torch.dtype]] = {}
        num_bytes = 0
        for name, count, dtype in arrays:
            self._spans[name] = (num_bytes, count * dtype.itemsize, dtype)
            num_bytes += -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self._packed = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        pinned = device.type == "cuda"
        self._staged = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._host = {name: self._view(self._staged, name).numpy() for name in self._spans}
        self._last = arrays[-1][0]
        self._copied = CopyFence(device)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The array on the device, one-dimensional."""
        return self._view(self._packed, name)

    def fill(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Copy to the beginning of each array. All arrays must be named; their shapes do not
        matter."""
        assert arrays.keys() == self._spans.keys()
        self._copied.wait()
        for name, array in arrays.items():
            self._host[name][: array.size] = array.reshape(-1)
        end = self._spans[self._last][0] + arrays[self._last].nbytes
        self._packed[:end].copy_(self._staged[:end], non_blocking=True)
        self._copied.mark()

    def _view(self, memory: torch.Tensor, name: str) -> torch.Tensor:
        start, size, dtype = self._spans[name]
        return memory[start : start + size].view(dtype)


class CopyFence:
    """Prevents overwriting host memory that a device is still reading."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def mark(self) -> None:
        """Record that all reads of the memory are queued on the current stream."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Wait until the device has done the reads before the last `mark`."""
        if self._event is not None:
            self._event.synchronize()
