"""The largest number in each row and its position: with our own kernel, or with numpy or torch.

Used for greedy sampling. This is a pass over all logits of a step, so the kernel uses all threads.
"""

from __future__ import annotations

import ctypes

import torch


class _LargestCall(ctypes.Structure):
    """Mirrors LargestCall in native/largest.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "values", "places")),
        *((name, ctypes.c_int64) for name in ("rows", "size")),
        ("num_threads", ctypes.c_int32),
    )


def largest(
    x: torch.Tensor, kernels: ctypes.CDLL | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest number in each row of `x` [R, size], fp32: its value [R], NaN if the row has a
    NaN, and its first position [R] int64. `kernels` are for tensors in host memory."""
    if x.device.type != "cpu":
        best = x.max(dim=-1)
        return best.values, best.indices
    if kernels is None or not x.is_contiguous():
        places = torch.from_numpy(x.numpy().argmax(axis=-1))  # several times as fast as torch's own
        return x.gather(-1, places[:, None]).squeeze(-1), places
    assert x.dtype == torch.float32
    rows, size = x.shape
    values, places = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    call = _LargestCall(x.data_ptr(), values.data_ptr(), places.data_ptr(), rows, size)
    call.num_threads = torch.get_num_threads()
    kernels.baton_largest(ctypes.byref(call))
    return values, places
