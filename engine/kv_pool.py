"""The paged KV pool: the one tensor that holds every KV block of a worker.

Owns the memory's shape and the number of blocks. The block manager tracks which blocks are in use;
transports move blocks. Block-major: block b is one contiguous range of `block_bytes` bytes that
starts at `base_address + b * block_bytes`, over all layers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch

from engine.cpu import huge_pages
from engine.device import available_bytes, kv_torch_dtype
from engine.gpu.shareable_memory import shareable_zeros, why_not_shareable
from protocol.errors import ConfigError
from protocol.layout import SPLIT, KvLayout

_DIGEST_BYTES = 16
_QUAD = 128  # numbers that share a span
_UNKNOWN = 255  # as kUnknown in native/split.h


class KvPool:
    """`num_blocks` zeroed KV blocks on one device, all of them resident.

    With `buffer` the pool uses memory that the caller allocated (a transport's shared memory). The
    buffer must be writable, on the CPU, have at least `num_blocks * block_bytes` bytes, and live as
    long as the pool.

    If several ranks share the blocks, this is rank 0's part of each, and `others` are those of the
    other ranks, in their order; only transfers and digests read them here.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        device: torch.device | str = "cpu",
        buffer: memoryview | None = None,
        others: Sequence[KvPool] = (),
    ) -> None:
        if num_blocks < 1:
            raise ConfigError(f"the KV pool needs at least 1 block, not {num_blocks}")
        self.layout = layout
        self.num_blocks = num_blocks
        self.others = others
        self.device = torch.device(device)
        self.block_bytes = layout.block_bytes
        shape = (num_blocks, *layout.block_shape)
        dtype = kv_torch_dtype(layout.dtype)
        # [num_blocks, layers, planes, heads, block_size, head_dim]
        self.spans = _unknown_spans(layout, num_blocks) if layout.order == SPLIT else None
        """The spans of a split pool's quads as far as this process knows them, [num_layers,
        num_blocks, quads of a block], uint8 (engine/native/split.h)."""
        if buffer is None and self.device.type == "cpu":
            self.tensor = huge_pages.zeros(shape, dtype).zero_()  # a limit shows now, not later
        elif buffer is None:
            self.tensor = shareable_zeros(shape, dtype, self.device)
        else:
            self.tensor = _tensor_over(buffer, shape, dtype, num_blocks * self.block_bytes)

    @property
    def base_address(self) -> int:
        """Address of block 0 in the device's memory."""
        return self.tensor.data_ptr()

    def digest(self, block: int) -> bytes:
        """The digest of a block's keys and values of all layers and heads, whatever ranks hold
        them."""
        if not self.others:
            return block_digest(self.tensor[block])
        whole = torch.empty(self.layout.unsharded.block_shape, dtype=self.tensor.dtype)
        for part in (self, *self.others):
            layers, heads = part.layout.layers, part.layout.heads
            own = whole[layers.start : layers.stop, :, heads.start : heads.stop]
            own.copy_(part.tensor[block])
        return block_digest(whole)

    def forget(self, blocks: Sequence[int]) -> None:
        """Mark the spans of `blocks` as unknown. Call this before anything but an attention backend
        writes to the blocks."""
        if self.spans is not None:
            self.spans.numpy()[:, blocks] = _UNKNOWN

    def why_not_shareable(self) -> str:
        """Why no other process can open the pool's memory by CUDA IPC; "" if one can, or if the
        pool is not on a card."""
        return why_not_shareable(self.tensor) if self.device.type == "cuda" else ""

    def layer(self, index: int) -> torch.Tensor:
        """View of one layer: `[num_blocks, num_planes, num_kv_heads, block_size, head_dim]`,
        strided."""
        return self.tensor[:, index]


def block_digest(block: torch.Tensor) -> bytes:
    """A digest of the contents of a block or part, whatever its strides."""
    data = block.contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _unknown_spans(layout: KvLayout, num_blocks: int) -> torch.Tensor:
    num_layers, *of_layer = layout.block_shape
    shape = (num_layers, num_blocks, math.prod(of_layer) // _QUAD)
    return torch.full(shape, _UNKNOWN, dtype=torch.uint8)


def blocks_for_memory(layout: KvLayout, num_bytes: int) -> int:
    """How many blocks fit into `num_bytes`; ConfigError with both sizes if none fits."""
    num_blocks = num_bytes // layout.block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"{num_bytes} bytes hold no KV block of {layout.block_bytes} bytes; "
            "give the KV pool more memory"
        )
    return num_blocks


def blocks_for_fraction(layout: KvLayout, device: torch.device, fraction: float) -> int:
    """How many blocks fit into `fraction` (0 to 1) of the memory that is free on `device` now."""
    if not 0.0 < fraction <= 1.0:
        raise ConfigError(f"the KV memory fraction must be above 0 and at most 1, not {fraction}")
    return blocks_for_memory(layout, int(available_bytes(device) * fraction))


def check_room(block_bytes: int, num_blocks: int, device: torch.device) -> None:
    """Raises ConfigError with both sizes if a host has no room for `num_blocks`: the kernel would
    kill the process while it touches them."""
    if device.type != "cpu":
        return
    needed, free = num_blocks * block_bytes, available_bytes(device)
    if needed > free:
        raise ConfigError(
            f"{num_blocks} KV blocks take {needed >> 20} MiB, and {free >> 20} MiB are free here "
            "(the machine's memory, or the container's limit): set num_blocks or memory_fraction "
            "lower, or raise the limit"
        )


def _tensor_over(
    buffer: memoryview, shape: tuple[int, ...], dtype: torch.dtype, num_bytes: int
) -> torch.Tensor:
    if buffer.readonly or buffer.nbytes < num_bytes:
        raise ValueError(
            f"the KV pool needs a writable buffer of {num_bytes} bytes, "
            f"got {'a read-only one' if buffer.readonly else f'{buffer.nbytes} bytes'}"
        )
    tensor = torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape))
    return tensor.zero_().view(shape)
