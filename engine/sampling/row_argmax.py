"""The largest number of each row, and where it stands: by our own kernel, or by numpy or torch.

What greedy choices are made of; a pass over all logits of a step, so both cores take part.
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
    """Of `x` [R, size], fp32: the largest number of each row [R], NaN where there is one, and the
    first place [R] int64 that has it. `kernels` are for tensors in host memory."""
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
