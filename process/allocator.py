"""What this process tells the C library's allocator of memory."""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
_LARGE = 1 << 17


def give_back_large_blocks() -> bool:
    """Have blocks of 128 KiB and more given back to the system as soon as they are freed.

    glibc begins so, but once it has freed one it keeps the like of it: what is small then settles
    in the gaps, and the next large block makes the process grow. For processes that seldom need
    one; those that compute with large tensors are faster otherwise. False where the C library has
    no such setting.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # not glibc
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGE))
