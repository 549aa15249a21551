"""FlashInfer's decode for a fixed number of sequences, in buffers at fixed addresses.

A CUDA graph captures `run` and `attend`. Before each replay, `plan` copies the batch's padded
arrays to the buffers that the captured kernels read, and plans for the batch's lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from engine.attention.base import KvTarget, Segment
from engine.attention.flashinfer_backend import (
    LAYOUT,
    CopyFence,
    FlashInferChoice,
    PoolLayers,
    load_flashinfer,
)
from engine.attention.paging import PagedBatch, pad_decodes, page


@dataclass(frozen=True)
class DecodeBuffers:
    """The arrays that captured kernels read, for up to M sequences. Graphs that take turns on one
    stream share them."""

    block_starts: torch.Tensor  # [M + 1] int32
    blocks: torch.Tensor  # [the most blocks that M contexts have together] int32
    last_lens: torch.Tensor  # [M] int32
    slots: torch.Tensor  # [M] int64

    @classmethod
    def of(cls, max_sequences: int, max_blocks: int, device: torch.device) -> DecodeBuffers:
        """Zeroed buffers for contexts with at most `max_blocks` blocks in total."""

        def zeros(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            zeros(max_sequences + 1, torch.int32),
            zeros(max_blocks, torch.int32),
            zeros(max_sequences, torch.int32),
            zeros(max_sequences, torch.int64),
        )


class FixedDecode:
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
        library = library or load_flashinfer()
        self._plan_again = library.fast_decode_plan
        self._layers = layers
        self._size = size
        self._block_starts = buffers.block_starts[: size + 1]
        self._blocks = buffers.blocks
        self._last_lens = buffers.last_lens[:size]
        self._slots = buffers.slots[:size]
        self._wrappers: dict[int | None, Any] = {
            window: library.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
                workspace,
                self._block_starts,
                self._blocks,
                self._last_lens,
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
        self._fill(self._block_starts, batch.block_starts)
        self._fill(self._blocks[: len(batch.blocks)], batch.blocks)
        self._fill(self._last_lens, batch.last_lens)
        self._fill(self._slots, batch.slots)
        for window, wrapper in self._wrappers.items():
            self._plan_window(wrapper, batch, self._layers.plan_arguments(window))
        self._is_planned = True
        self._copied.mark()

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See AttentionBackend."""
        self._layers.store(layer, self._slots, k, v)
        return self.attend(layer, q)

    def target(self, layer: int) -> KvTarget:
        """See StoringAttention."""
        return self._layers.target(layer, self._slots)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """See StoringAttention."""
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

    def _fill(self, buffer: torch.Tensor, array: np.ndarray) -> None:
        buffer.copy_(self._layers.host(array), non_blocking=True)
