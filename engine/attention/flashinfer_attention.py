"""Paged attention by FlashInfer's kernels, on a CUDA card, over the pool in place.

Keys and values are the views of `engine.attention.pool_layers`; FlashInfer calls their layout
"HND". A batch takes at most two calls per layer, one for decodes and one for chunks, or a single
call for both where that measured faster. FlashInfer's `plan` copies from its own pinned memory
asynchronously, so the next plan waits until the previous copies are done.

Calls follow FlashInfer 0.6.13 to 0.7.2 (https://docs.flashinfer.ai/api/attention.html). Its
`window_left` counts the tokens that a query sees before itself: our window minus one.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from engine.attention.base import Segment
from engine.attention.fixed_buffers import CopyFence
from engine.attention.paging import PagedBatch, page
from engine.attention.pool_layers import PoolAttention, PoolLayers
from engine.device import to_device
from protocol.errors import ConfigError

HEAD_DIMS = (64, 128, 256)
_CUDA_CORE_GROUPS = (1, 2, 3, 4, 8)  # query heads per KV head in its plain decode
_TENSOR_CORE_GROUP = 4  # groups of at least this size fill enough of a tensor core's tile
LAYOUT = "HND"
_DECODE_BACKEND = "fa2"  # also in graphs; with "auto", 0.7 may take cuDNN, which rounds differently
_LEAST_WORKSPACE = 128 << 20  # FlashInfer's recommendation
_ALIGNMENT = 1 << 10
_ANY_CHUNK = 1 << 10  # enough rows to fill the largest tile


class FlashInferUnavailable(ConfigError):
    """FlashInfer cannot serve this model on this machine; the message says why."""


@dataclass(frozen=True)
class FlashInferChoice:
    """Which of FlashInfer's kernels a model uses."""

    prefill: str
    """`fa3` (Hopper's own instructions) or `fa2`."""
    decode_on_tensor_cores: bool


def choose_kernels(
    num_heads: int, num_kv_heads: int, kv_dtype: torch.dtype, is_hopper: bool
) -> FlashInferChoice:
    """The kernels for these heads; fa3 does not support 8-bit KV with 16-bit queries."""
    group = num_heads // num_kv_heads
    is_8_bit = kv_dtype.itemsize == 1
    return FlashInferChoice(
        prefill="fa3" if is_hopper and not is_8_bit else "fa2",
        decode_on_tensor_cores=(
            is_8_bit or group >= _TENSOR_CORE_GROUP or group not in _CUDA_CORE_GROUPS
        ),
    )


def load_flashinfer() -> ModuleType:
    """Import FlashInfer. Raises FlashInferUnavailable if that, or importing Triton, fails."""
    try:
        importlib.import_module("triton")
        return importlib.import_module("flashinfer")
    except (ImportError, OSError) as error:
        raise FlashInferUnavailable(f"FlashInfer cannot be loaded: {error}") from error


def check_supported(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Raises FlashInferUnavailable unless a model of this dtype and head size can be served."""
    if device.type != "cuda":
        raise FlashInferUnavailable(f"FlashInfer runs on a CUDA card, not on {device}")
    if dtype not in (torch.bfloat16, torch.float16):
        raise FlashInferUnavailable(f"FlashInfer takes bfloat16 and float16, not {dtype}")
    if head_dim not in HEAD_DIMS:
        sizes = ", ".join(map(str, HEAD_DIMS))
        raise FlashInferUnavailable(f"FlashInfer takes heads of {sizes}, not of {head_dim}")


def workspace_bytes(
    heads: tuple[int, int], head_dim: int, max_sequences: int, num_multiprocessors: int
) -> int:
    """Bytes for the partial results of split contexts; `heads` are (query heads, KV heads).

    This is the most that FlashInfer's scheduler requests (`PrefillPlan` in
    attention/scheduler.cuh, which also plans decodes on tensor cores): it splits chunks over two
    thread blocks per multiprocessor, and a captured decode also has a tile per sequence. A plan
    that finds less memory fails.
    """
    num_heads, num_kv_heads = heads
    group = num_heads // num_kv_heads
    splits = 2 * num_multiprocessors // num_kv_heads
    decode_rows = _tile_rows(group, head_dim)
    tiles = -(-max_sequences * group // decode_rows) + max_sequences - 1
    rows = max(splits * _tile_rows(_ANY_CHUNK, head_dim), max(splits, tiles) * decode_rows)
    partial_results = 4 * num_heads * rows * (head_dim + 1)  # fp32: sums, and a log-sum-exp each
    return max(_LEAST_WORKSPACE, partial_results + _ALIGNMENT)


def _tile_rows(rows: int, head_dim: int) -> int:
    """Rows (queries times heads of a group) in the tile of one thread block, for `rows` in all."""
    if rows > 64 and head_dim < 256:
        return 128
    return 64 if rows > 16 else 16


def plan_arguments(layers: PoolLayers, window: int | None) -> dict[str, Any]:
    """The arguments common to every `plan`, for layers of this window."""
    return {
        "num_qo_heads": layers.num_heads,
        "num_kv_heads": layers.num_kv_heads,
        "page_size": layers.block_size,
        "window_left": -1 if window is None else window - 1,
        "sm_scale": layers.scoring.scale,
        "logits_soft_cap": layers.scoring.cap,
        "q_data_type": layers.dtype,
        "kv_data_type": layers.kv_dtype,
    }


class FlashInferAttention(PoolAttention):
    """`StoringAttention` for any batch. `workspace` is [`workspace_bytes`] uint8, zeroed, on the
    device. Backends that take turns on one stream may share it.

    With `joins_mixed`, mixed batches take one call: the chunks' kernel computes the decodes, too.
    """

    def __init__(
        self,
        layers: PoolLayers,
        workspace: torch.Tensor,
        choice: FlashInferChoice,
        library: ModuleType | None = None,
    ) -> None:
        super().__init__(layers)
        library = library or load_flashinfer()
        self.choice = choice
        self._decodes: dict[int | None, Any] = {}
        self._chunks: dict[int | None, Any] = {}
        for window in set(layers.windows):
            self._decodes[window] = library.BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                LAYOUT,
                use_tensor_cores=choice.decode_on_tensor_cores,
                backend=_DECODE_BACKEND,
            )
            self._chunks[window] = library.BatchPrefillWithPagedKVCacheWrapper(
                workspace, LAYOUT, backend=choice.prefill
            )
        self.joins_mixed = False
        self._num_decodes = self._num_tokens = 0
        self._copied = CopyFence(layers.device)

    def plan(self, segments: Sequence[Segment]) -> None:
        """See AttentionBackend. The leading segments of one token are decodes."""
        batch = page(segments, self._layers.block_size)
        self._copied.wait()
        self._slots = to_device(torch.from_numpy(batch.slots), self._layers.device)
        decodes = _leading_decodes(batch)
        self._num_decodes = 0 if self.joins_mixed and decodes < batch.num_segments else decodes
        self._num_tokens = batch.num_tokens
        for window in self._decodes:
            arguments = plan_arguments(self._layers, window)
            if self._num_decodes:
                self._plan_decodes(self._decodes[window], batch, arguments)
            if self._num_decodes < batch.num_segments:
                self._plan_chunks(self._chunks[window], batch, arguments)
        self._copied.mark()

    def attend(
        self, layer: int, q: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See StoringAttention; computes no sinks."""
        assert sinks is None
        caches, window = self._layers.caches[layer], self._layers.windows[layer]
        out = q.new_empty(q.shape)
        split = self._num_decodes
        if split:
            self._decodes[window].run(q[:split], caches, out=out[:split])
        if split < self._num_tokens:
            self._chunks[window].run(q[split:], caches, out=out[split:])
        return out

    def _plan_decodes(self, wrapper: Any, batch: PagedBatch, arguments: dict[str, Any]) -> None:
        count = self._num_decodes
        wrapper.plan(
            self._layers.host(batch.block_starts[: count + 1]),
            self._layers.host(batch.blocks[: batch.block_starts[count]]),
            self._layers.host(batch.last_lens[:count]),
            head_dim=self._layers.head_dim,
            **arguments,
        )

    def _plan_chunks(self, wrapper: Any, batch: PagedBatch, arguments: dict[str, Any]) -> None:
        first = self._num_decodes
        starts = batch.query_starts[first:]
        wrapper.plan(
            self._layers.host(starts - starts[0]),
            self._layers.host(batch.block_starts[first:] - batch.block_starts[first]),
            self._layers.host(batch.blocks[batch.block_starts[first] :]),
            self._layers.host(batch.last_lens[first:]),
            head_dim_qk=self._layers.head_dim,
            causal=True,
            max_token_per_sequence=int(np.diff(starts).max()),  # else a Python loop counts them
            **arguments,
        )


def _leading_decodes(batch: PagedBatch) -> int:
    """How many segments of one token come before the first longer segment."""
    longer = np.flatnonzero(np.diff(batch.query_starts) > 1)
    return int(longer[0]) if len(longer) else batch.num_segments
