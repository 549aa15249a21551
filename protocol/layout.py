"""The layout of a worker's KV pool, and the fingerprints two workers compare before all else."""

from __future__ import annotations

import hashlib
import math

import msgspec

from protocol.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""What a model computes in."""

FP8 = "float8_e4m3fn"
KV_DTYPE_BYTES = DTYPE_BYTES | {FP8: 1}
"""What keys and values are kept in."""

TOKENS = "tokens"
PAIRS = "pairs"
"""Orders within a head's share of a block, `[block_size, head_dim]`: token by token, or as a CPU's
products of bf16 pairs take them, by groups of sixteen tokens: of keys `[head_dim / 2, 16, 2]`, of
values `[8 pairs of tokens, head_dim, 2]`."""

SPLIT = "split"
"""An order of all that a block holds of a layer: pairs whose numbers' upper exponent bits lie apart
(`engine/native/split.h`). A head's share is not in one piece, so it cannot be sharded."""


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
    order: str = TOKENS

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """`(num_layers, 2, num_kv_heads, block_size, head_dim)`."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        return math.prod(self.block_shape) * KV_DTYPE_BYTES[self.dtype]

    @property
    def heads(self) -> range:
        """Of all the cache's KV heads those that this rank holds."""
        first = self.tp_rank * self.num_kv_heads
        return range(first, first + self.num_kv_heads)

    @property
    def unsharded(self) -> KvLayout:
        """The layout of all ranks' heads in one pool; ranks of one cache have it in common."""
        num_kv_heads = self.num_kv_heads * self.tp_size
        return msgspec.structs.replace(self, num_kv_heads=num_kv_heads, tp_rank=0, tp_size=1)

    def shard(self, tp_rank: int, tp_size: int) -> KvLayout:
        """What rank `tp_rank` of `tp_size` holds of an unsharded cache. Raises ConfigError."""
        if not 0 <= tp_rank < tp_size or self.num_kv_heads % tp_size:
            raise ConfigError(
                f"{self.num_kv_heads} KV heads have no rank {tp_rank} of {tp_size}: "
                "the number of ranks must divide that of the heads"
            )
        if self.order == SPLIT and tp_size > 1:
            raise ConfigError("blocks in the order 'split' cannot be shared out by heads")
        num_kv_heads = self.num_kv_heads // tp_size
        return msgspec.structs.replace(
            self, num_kv_heads=num_kv_heads, tp_rank=tp_rank, tp_size=tp_size
        )

    @property
    def fingerprint(self) -> str:
        """32 hex digits; equal exactly when blocks of one pool can be copied into the other."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=16).hexdigest()
