"""The layout of a worker's KV pool, and the fingerprints two workers compare before all else."""

from __future__ import annotations

import hashlib
import math

import msgspec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""What a model computes in."""

FP8 = "float8_e4m3fn"
KV_DTYPE_BYTES = DTYPE_BYTES | {FP8: 1}
"""What keys and values are kept in."""


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of one KV block: `[num_layers, 2, num_kv_heads, block_size, head_dim]`, contiguous.

    A pool is `num_blocks` such blocks, so a block is one contiguous range over all layers.
    `num_kv_heads` counts the heads that this rank holds.
    """

    model_fingerprint: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    tp_rank: int = 0
    tp_size: int = 1

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """`(num_layers, 2, num_kv_heads, block_size, head_dim)`."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        return math.prod(self.block_shape) * KV_DTYPE_BYTES[self.dtype]

    @property
    def fingerprint(self) -> str:
        """32 hex digits; equal exactly when blocks of one pool can be copied into the other."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=16).hexdigest()
