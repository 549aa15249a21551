"""Settings of the C library's memory allocator for this process."""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
_LARGE = 1 << 17


def give_back_large_blocks() -> bool:
    """Return blocks of 128 KiB and more to the system as soon as they are freed.

    glibc starts this way, but raises its threshold once it has freed such a block: small blocks
    then settle in the gaps, and the next large block makes the process grow. Use it in processes
    that seldom need large blocks; processes that compute with large tensors are faster without.
    Returns False if the C library has no such setting.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # not glibc
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGE))
