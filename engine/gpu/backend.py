"""The backend of a model on a CUDA card: FlashInfer's attention and our Triton kernels.

Owns the workspace that all attention objects share; they take turns on one stream. The backend is
created before the weights are loaded, so that missing libraries are reported first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from engine.attention.flashinfer_backend import (
    FlashInferAttention,
    FlashInferChoice,
    PoolLayers,
    check_supported,
    choose_kernels,
    load_flashinfer,
    workspace_bytes,
)
from engine.attention.flashinfer_graph import DecodeBuffers, FixedDecode
from engine.checkpoint.config import ModelConfig
from engine.gpu.tuning import MixedStep, choose_mixed, faster_chunks
from engine.kv_pool import KvPool
from engine.layers.ops import LayerOps

logger = logging.getLogger(__name__)

_HOPPER = 9  # compute capability's major number


class CardBackend:
    """The kernels for one model and up to `max_sequences` decodes at once. Raises
    FlashInferUnavailable if FlashInfer cannot serve the model."""

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        max_sequences: int = 256,
    ) -> None:
        check_supported(device, dtype, config.head_dim)
        self._library = load_flashinfer()
        self._config = config
        self._dtype = dtype
        is_hopper = torch.cuda.get_device_capability(device)[0] == _HOPPER
        self.choice = choose_kernels(config.num_heads, config.num_kv_heads, kv_dtype, is_hopper)
        logger.info(
            "attention by FlashInfer %s: prefill by %s, decode on %s; kernels that were not built "
            "on this machine before take minutes",
            self._library.__version__,
            self.choice.prefill,
            "tensor cores" if self.choice.decode_on_tensor_cores else "plain cores",
        )
        num_bytes = workspace_bytes(
            (config.num_heads, config.num_kv_heads),
            config.head_dim,
            max_sequences,
            torch.cuda.get_device_properties(device).multi_processor_count,
        )
        self._workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def ops(self) -> LayerOps:
        """The operations between a layer's products."""
        from engine.gpu.ops import TritonOps  # needs Triton

        return TritonOps(self._config.hidden_act, self._config.rms_norm_eps, self._dtype)

    def attention(
        self, pool: KvPool, choice: FlashInferChoice | None = None
    ) -> FlashInferAttention:
        """Attention for any batch over `pool`, with the model's kernels or those of `choice`."""
        chosen = choice or self.choice
        return FlashInferAttention(self.layers(pool), self._workspace, chosen, self._library)

    def tuned_attention(self, pool: KvPool, typical: MixedStep) -> FlashInferAttention:
        """Like `attention`, with the kernels that measure faster for the `typical` step; only reads
        the pool. fa2 is tried against fa3 only if decodes use fa2's kernel anyway, so that the
        trial does not have to build a kernel."""
        attention, layers = self.attention(pool), self.layers(pool)
        if self.choice.prefill == "fa3" and self.choice.decode_on_tensor_cores:
            other = self.attention(pool, replace(self.choice, prefill="fa2"))
            attention = faster_chunks([attention, other], layers, typical)
        choose_mixed(attention, layers, typical)
        return attention

    def fixed_decodes(
        self, pool: KvPool, max_sequences: int, max_blocks: int
    ) -> Callable[[int], FixedDecode]:
        """A factory of attention for a fixed number of decodes, for capture in graphs. All share
        buffers for `max_sequences` contexts with `max_blocks` blocks in total."""
        layers = self.layers(pool)
        buffers = DecodeBuffers.of(max_sequences, max_blocks, pool.device)

        def make(size: int) -> FixedDecode:
            return FixedDecode(layers, size, buffers, self._workspace, self.choice, self._library)

        return make

    def layers(self, pool: KvPool) -> PoolLayers:
        """The model's layers in `pool`, as views for the kernels."""
        return PoolLayers(pool, self._config.sliding_windows, self._config.num_heads, self._dtype)
