"""The pieces of a pool's blocks as an array, so that many are copied by one call.

The memory belongs to the caller.
"""

from __future__ import annotations

import ctypes

import numpy as np

from kv_transfer.head_slices import Pieces


def pieces_of(address: int, num_blocks: int, pieces: Pieces) -> np.ndarray:
    """View of a pool's pieces, [num_blocks, pieces of a block, bytes of a piece]. The view does
    not keep the pool's mapping open and must not outlive it."""
    memory = (ctypes.c_uint8 * (num_blocks * pieces.block_bytes)).from_address(address)
    shape = (num_blocks, pieces.count, pieces.size)
    strides = (pieces.block_bytes, pieces.stride, 1)
    return np.ndarray(shape, np.uint8, memoryview(memory), pieces.start, strides)
