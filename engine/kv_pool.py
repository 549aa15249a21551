"""The paged KV pool: the one tensor that holds every KV block of a worker.

Owns the memory's shape and the number of blocks. The block manager tracks which blocks are in use;
transports move blocks. Block-major: block b is one contiguous range of `block_bytes` bytes that
starts at `base_address + b * block_bytes`, over all layers.

If layers differ in what they keep (`KvLayout.grouping`), each group has blocks of its own size over
the same memory: a view of all of it as blocks of that size. The block managers see to it that a
large page holds blocks of one group at a time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from copy import copy

import torch

from engine.cpu import huge_pages
from engine.device import available_bytes, kv_torch_dtype
from engine.gpu.shareable_memory import shareable_zeros, why_not_shareable
from protocol.block_order import layer_places
from protocol.errors import ConfigError
from protocol.layout import SPLIT, KvLayout
from scheduling.pool_sizes import blocks_in, pages_of

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

    `groups[g]` is the pool as blocks of group g, with this rank's layers of the group, which may be
    none. If there is only one group, it is the pool itself. With several groups, `num_blocks` is
    the number of blocks over all layers that the memory would hold, and the pool's own tensor is
    [num_pages, numbers of a large page].
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
        self.model_layers: Sequence[int] = range(len(layout.layers))
        """The layers whose blocks these are, counted from the first that this rank has."""
        self.holds_states = False
        """Whether a block is the states of a group's layers: [layers, 1, parts, 1, numbers of a
        part], fp32."""
        self.device = torch.device(device)
        self.block_bytes = layout.block_bytes
        self.num_pages = pages_of(layout, num_blocks)
        """Large pages; blocks if there is one group."""
        self.spans: torch.Tensor | None = None
        """The spans of a split pool's quads as far as this process knows them, [num_layers,
        num_blocks, quads of a block], uint8 (engine/native/split.h)."""
        dtype = kv_torch_dtype(layout.dtype)
        shape = (num_blocks, *_tensor_shape(layout))
        if layout.grouping:
            shape = (self.num_pages, layout.page_bytes // dtype.itemsize)
        if buffer is None and self.device.type == "cpu":
            self.tensor = huge_pages.zeros(shape, dtype).zero_()  # a limit shows here
        elif buffer is None:
            self.tensor = shareable_zeros(shape, dtype, self.device)
        else:
            self.tensor = _tensor_over(buffer, shape, dtype, math.prod(shape) * dtype.itemsize)
        if layout.grouping:
            self.groups = tuple(_view(self, index) for index in range(len(layout.groups)))
        else:
            self.groups = (self,)
            if layout.order == SPLIT:
                self.spans = _unknown_spans(layout, num_blocks)

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory."""
        return self.tensor.nbytes

    @property
    def base_address(self) -> int:
        """Address of block 0 in the device's memory."""
        return self.tensor.data_ptr()

    @property
    def has_all_ranks(self) -> bool:
        """Whether this process reaches the blocks' parts on all ranks, not only those of the ranks
        on its host or card."""
        return len(self.layout.ranks) == 1 + len(self.others)

    def digest(self, block: int) -> bytes:
        """The digest of a block's keys and values of all layers and heads, whatever ranks hold
        them. If the pool has several groups, call this on the pool of the block's group."""
        if not self.others and not self.layout.peer_stages:
            return block_digest(self.tensor[block])
        whole = torch.empty(self.layout.unsharded.block_shape, dtype=self.tensor.dtype)
        for part in (self, *self.others):
            heads = part.layout.heads
            for number, layer in enumerate(part.layout.layers):
                whole[layer, :, heads.start : heads.stop].copy_(part.layer(number)[block])
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
        if not self.layout.peer_stages:
            return self.tensor[:, index]
        place, (_, *of_layer) = layer_places(self.layout)[index], self.layout.block_shape
        strides = place.plane_stride, place.head_stride, self.layout.head_dim, 1
        return self.tensor.as_strided(
            (self.num_blocks, *of_layer),
            (self.tensor.stride(0), *strides),
            self.tensor.storage_offset() + place.start,
        )


def _view(pool: KvPool, index: int) -> KvPool:
    """The pool as blocks of one group."""
    view = copy(pool)
    group = pool.layout.groups[index]
    view.layout = layout = pool.layout.of_group(index)
    own, first = layout.layers, pool.layout.layers.start
    view.model_layers = [layer - first for layer in group.layers[own.start : own.stop]]
    view.num_blocks = pool.num_pages * pool.layout.blocks_per_page(index)
    view.block_bytes = pool.layout.block_stride(index)
    memory, shape = pool.tensor, _tensor_shape(layout)
    if group.state_numbers is not None:
        view.holds_states = True
        memory = memory.view(torch.float32)
    strides = torch.empty(shape, device="meta").stride()
    stride = view.block_bytes // memory.element_size()
    view.tensor = memory.as_strided((view.num_blocks, *shape), (stride, *strides))
    view.others = [each.groups[index] for each in pool.others]
    view.groups = (view,)
    if layout.order == SPLIT:
        view.spans = _unknown_spans(layout, view.num_blocks)
    return view


def _tensor_shape(layout: KvLayout) -> tuple[int, ...]:
    """The dimensions of a block. A block that is not ordered layer by layer is one row of numbers,
    which only `layer` divides."""
    return (math.prod(layout.block_shape),) if layout.peer_stages else layout.block_shape


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
    num_blocks = blocks_in(layout, num_bytes)
    if num_blocks < 1:
        size = layout.page_bytes if layout.grouping else layout.block_bytes
        raise ConfigError(
            f"{num_bytes} bytes hold no KV block of {size} bytes; give the KV pool more memory"
        )
    return num_blocks


def blocks_for_fraction(layout: KvLayout, device: torch.device, fraction: float) -> int:
    """How many blocks fit into `fraction` (0 to 1) of the memory that is free on `device` now."""
    if not 0.0 < fraction <= 1.0:
        raise ConfigError(f"the KV memory fraction must be above 0 and at most 1, not {fraction}")
    return blocks_for_memory(layout, int(available_bytes(device) * fraction))


def check_room(needed: int, num_blocks: int, device: torch.device) -> None:
    """Raises ConfigError with both sizes if a host has no room for the `needed` bytes of
    `num_blocks`: the kernel would kill the process while it touches them."""
    if device.type != "cpu":
        return
    free = available_bytes(device)
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
