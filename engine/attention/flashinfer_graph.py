"""FlashInfer's decode for a fixed number of sequences, in buffers at fixed addresses.

A CUDA graph captures `run` and `attend`. Before each replay, `plan` copies the batch's padded
arrays to the buffers that the captured kernels read, and plans for the batch's lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from engine.attention.base import Segment
from engine.attention.fixed_buffers import CopyFence, FixedBuffers
from engine.attention.flashinfer_attention import (
    LAYOUT,
    FlashInferChoice,
    load_flashinfer,
    plan_arguments,
)
from engine.attention.paging import PagedBatch, pad_decodes, page
from engine.attention.pool_layers import PoolAttention, PoolLayers


class DecodeBuffers:
    """The arrays that captured kernels read, for up to M sequences. Graphs that take turns on one
    stream share them."""

    def __init__(self, max_sequences: int, max_blocks: int, device: torch.device) -> None:
        """Zeroed buffers for contexts with at most `max_blocks` blocks in total."""
        arrays = (
            ("slots", max_sequences, torch.int64),
            ("block_starts", max_sequences + 1, torch.int32),
            ("last_lens", max_sequences, torch.int32),
            ("blocks", max_blocks, torch.int32),  # last: a step fills its beginning only
        )
        self._buffers = FixedBuffers(arrays, device)
        self.slots = self._buffers["slots"]  # [M] int64
        self.block_starts = self._buffers["block_starts"]  # [M + 1] int32
        self.last_lens = self._buffers["last_lens"]  # [M] int32
        self.blocks = self._buffers["blocks"]  # [max_blocks] int32

    def fill(self, batch: PagedBatch) -> None:
        """Copy the arrays of a batch of decodes to the beginning of each buffer."""
        self._buffers.fill(
            {
                "slots": batch.slots,
                "block_starts": batch.block_starts,
                "last_lens": batch.last_lens,
                "blocks": batch.blocks,
            }
        )


class FixedDecode(PoolAttention):
    """`StoringAttention` for `size` decodes, padding included. Shares its `workspace` with
    FlashInferAttention."""

    def __init__(
        self,
        layers: PoolLayers,
        size: int,
        buffers: DecodeBuffers,
        workspace: torch.Tensor,
        choice: FlashInferChoice,
        library: ModuleType | None = None,
    ) -> None:
        super().__init__(layers)
        library = library or load_flashinfer()
        self._plan_again = library.fast_decode_plan
        self._size = size
        self._buffers = buffers
        self._slots = buffers.slots[:size]
        self._wrappers: dict[int | None, Any] = {
            window: library.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
                workspace,
                buffers.block_starts[: size + 1],
                buffers.blocks,
                buffers.last_lens[:size],
                LAYOUT,
                use_tensor_cores=choice.decode_on_tensor_cores,
            )
            for window in set(layers.windows)
        }
        self._is_planned = False
        self._copied = CopyFence(layers.device)

    def plan(self, segments: Sequence[Segment]) -> None:
        """See AttentionBackend; takes at most `size` segments of one token each.

        The first plan looks up (and may build) the kernels; later calls only plan.
        """
        batch = pad_decodes(page(segments, self._layers.block_size), self._size)
        self._copied.wait()
        self._buffers.fill(batch)
        for window, wrapper in self._wrappers.items():
            self._plan_window(wrapper, batch, plan_arguments(self._layers, window))
        self._is_planned = True
        self._copied.mark()

    def attend(
        self, layer: int, q: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See StoringAttention; computes no sinks."""
        assert sinks is None
        wrapper = self._wrappers[self._layers.windows[layer]]
        result: torch.Tensor = wrapper.run(q, self._layers.caches[layer])
        return result

    def _plan_window(self, wrapper: Any, batch: PagedBatch, arguments: dict[str, Any]) -> None:
        """Plan one window. The first time calls `plan`, which looks up the kernels and copies the
        arrays again; later `fast_decode_plan`, which relies on the filled buffers."""
        arrays = [torch.from_numpy(a) for a in (batch.block_starts, batch.blocks, batch.last_lens)]
        if self._is_planned:
            self._plan_again(wrapper, *arrays, head_dim=self._layers.head_dim, **arguments)
        else:
            wrapper.plan(*arrays, head_dim=self._layers.head_dim, **arguments)
