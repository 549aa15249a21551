"""The layout of a worker's KV pool, and its fingerprint, which two workers compare first."""

from __future__ import annotations

import hashlib
import math

import msgspec

from protocol.bounds import Dimension, Text
from protocol.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Data types that a model computes in."""

FP8 = "float8_e4m3fn"
KV_DTYPE_BYTES = DTYPE_BYTES | {FP8: 1}
"""Data types that keys and values are stored in."""

TOKENS = "tokens"
PAIRS = "pairs"
"""Element orders within one head's part of a block, `[block_size, head_dim]`. TOKENS: token by
token. PAIRS: as a CPU's bf16 pair products read them, in groups of sixteen tokens: keys are
`[head_dim / 2, 16, 2]`, values `[8 pairs of tokens, head_dim, 2]`."""

SPLIT = "split"
"""An order over one layer's whole part of a block: PAIRS, with four exponent bits of each number
stored separately (`engine/native/split.h`). A head's part is not contiguous, so blocks in this
order cannot be sharded."""

KEYS_AND_VALUES = 2
"""Planes of a layer's part of a block; latents have one."""


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of one KV block: `[num_layers, num_planes, num_kv_heads, block_size, head_dim]`,
    contiguous.

    A pool consists of `num_blocks` such blocks, so a block is one contiguous range over all
    layers. `num_kv_heads` counts the heads that this rank holds. The two planes are keys and
    values. Latent attention has one plane of one head, whose rows serve as both.
    """

    model_fingerprint: Text
    dtype: Text
    num_layers: Dimension
    num_kv_heads: Dimension
    block_size: Dimension
    head_dim: Dimension
    tp_rank: Dimension = 0
    tp_size: Dimension = 1
    order: Text = TOKENS
    num_planes: Dimension = KEYS_AND_VALUES

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """`(num_layers, num_planes, num_kv_heads, block_size, head_dim)`."""
        return (
            self.num_layers,
            self.num_planes,
            self.num_kv_heads,
            self.block_size,
            self.head_dim,
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers and planes."""
        return math.prod(self.block_shape) * KV_DTYPE_BYTES[self.dtype]

    @property
    def worker_block_bytes(self) -> int:
        """Bytes of one block on all ranks."""
        return self.block_bytes * self.tp_size

    @property
    def heads(self) -> range:
        """The indices of this rank's heads among all KV heads of the cache."""
        first = self.tp_rank * self.num_kv_heads
        return range(first, first + self.num_kv_heads)

    @property
    def unsharded(self) -> KvLayout:
        """The layout of all ranks' heads in one pool; the same for all ranks of one cache."""
        num_kv_heads = self.num_kv_heads * self.tp_size
        return msgspec.structs.replace(self, num_kv_heads=num_kv_heads, tp_rank=0, tp_size=1)

    def shard(self, tp_rank: int, tp_size: int) -> KvLayout:
        """The layout of rank `tp_rank` of `tp_size` of this unsharded cache. Raises ConfigError."""
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
        fields = msgspec.structs.asdict(self)
        if self.num_planes == KEYS_AND_VALUES:  # as workers that know no other number compute it
            del fields["num_planes"]
        return hashlib.blake2b(msgspec.msgpack.encode(fields), digest_size=16).hexdigest()
