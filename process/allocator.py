"""Returns this process's memory to the system: settings of the C library's allocator and of
Python's garbage collector.
"""

from __future__ import annotations

import ctypes
import gc

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
_LARGE = 1 << 17
ALLOCATIONS = 10_000
"""The number of new objects after which the collector scans the youngest generation. Garbage in
cycles is a megabyte or two by then. Python's default makes the collector scan 14 times as often."""


def give_back_large_blocks() -> bool:
    """Return blocks of 128 KiB and more to the system as soon as they are freed.

    glibc does so at first, but raises its threshold once it has freed such a block. Small blocks
    then settle in the gaps, and the next large block makes the process grow. Call this in processes
    that seldom need large blocks; processes that compute with large tensors are faster without this
    setting. Returns False if the C library has no such setting.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # not glibc
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGE))


def spare_the_collector(middle_per_full: int = 10) -> None:
    """Exempt all objects that exist now from garbage collection. Other objects are collected in
    full after every `middle_per_full` collections of the middle generation.

    The modules of a worker alone are 190,000 objects, and a full collection takes a tenth of a
    second, during which all streams stall. Reference counting frees the objects of requests; cycles
    are rare.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(ALLOCATIONS, 10, middle_per_full)
