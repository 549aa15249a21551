"""The interface of the machine that computes a model: one protocol for CPUs, cards and ranks.

The loader chooses a backend once, from the settings, before anything large is loaded. Everything
that depends on the machine is behind the protocol: how weights are stored and multiplied, the
operations between products, attention, sampling, graphs, fused steps, and how many KV blocks fit. A
backend serves one model. `engine.cpu.backend` and `engine.gpu.backend` implement the protocol;
`engine.parallel` implements it for a rank of several, over the backend of the rank's own device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.attention.base import AttentionBackend, Segment
from engine.checkpoint.quantized_blocks import BlockMatrix, Matrix
from engine.checkpoint.shard import Shard
from engine.kv_pool import KvPool
from engine.layers.embedding import Embedding
from engine.layers.experts import LayerFactory
from engine.layers.linear import LinearLayer
from engine.layers.ops import LayerOps
from engine.models.parts import ModelParts
from engine.models.runnable import RunnableModel, WholeStep
from engine.sampling.chosen_tokens import LateTokens
from engine.sampling.sampler import Sampler
from protocol.layout import KvLayout
from scheduling.pool_sizes import LEAST_STATES

WHOLE = Shard(0, 1)
"""The shard of a rank that has the whole model."""


@dataclass(frozen=True)
class Sizes:
    """The limits of an engine's steps and of its pool; None for limits that are not set."""

    max_sequences: int  # in a step
    max_chunk: int  # tokens of prompts in a step
    context: int  # tokens of a request
    num_blocks: int | None = None  # None: as many as fit
    memory_fraction: float | None = None  # None: the device's default
    captures: bool = False  # whether decodes are captured as graphs, where a device has them
    sharing: int = 1  # engines and ranks that share the device's memory equally

    def most_blocks(self, layout: KvLayout) -> int:
        """The blocks of a full batch at full context: no more can be used. With states, there is
        also room for the states of that batch, and for as many cached ones, after which prompts can
        continue."""
        num_blocks = self.max_sequences * -(-self.context // layout.block_size)
        if not layout.has_states:
            return num_blocks
        return num_blocks + 2 * LEAST_STATES * self.max_sequences * layout.blocks_per_page(0)


class CapturedDecodes(Protocol):
    """Passes of decodes that were captured once and are replayed."""

    @property
    def max_sequences(self) -> int:
        """The largest batch that was captured."""

    def padded(self, num_sequences: int) -> int:
        """The size of the captured pass that computes so many decodes."""

    def logits(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        segments: Sequence[Segment],
        late: LateTokens | None = None,
    ) -> torch.Tensor:
        """Logits [B, vocab], fp32, of B decodes; valid until the next call. `late` tokens replace
        some of `tokens`."""


class FusedPass(Protocol):
    """All layers of a model in one call, over the attention backends that it supports."""

    def supports(self, attention: AttentionBackend) -> bool:
        """Whether the pass runs over this attention backend."""

    def __call__(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run all layers on `x` [N, hidden] in place. Returns `x`, or only its `rows` [W]."""

    def whole_step(self, attention: AttentionBackend) -> WholeStep | None:
        """A whole step in one call, over this backend's pool; None for a stage of a pipeline."""


class Backend(LayerFactory, Protocol):
    """One model's machine. Constructors raise ConfigError for settings that it does not support."""

    device: torch.device
    dtype: str
    """The dtype of weights and activations; a name that `engine.device.torch_dtype` knows."""
    kv_dtype: str
    """The dtype of the KV pool; a name that `engine.device.kv_torch_dtype` knows."""
    shard: Shard
    """The part of each layer's weights and of the KV heads that is computed here."""
    rounds_weights: bool
    """Whether weights lose bits when they are loaded, so that they compute other KV."""
    keeps_blocks: bool
    """Whether quantized weights of a GGUF file are multiplied as they are."""
    numerics: str
    """A name for everything else that workers must share to exchange blocks; "" if there is nothing
    else."""

    def orders(self, layout: KvLayout) -> Sequence[str]:
        """The orders of keys and values in a block that attention reads, fastest first."""

    # Layers

    def logits_linear(self, weight: Matrix) -> LinearLayer:
        """The layer of the logits, whose weight is rounded less than others."""

    def embedding(self, weight: torch.Tensor | BlockMatrix) -> Embedding:
        """The look-up of tokens."""

    def ops(self) -> LayerOps:
        """The operations between products."""

    def fuse(self, parts: ModelParts) -> FusedPass | None:
        """The model's layers in one call; None if this is not supported."""

    # Steps

    def attention(self, pool: KvPool) -> AttentionBackend:
        """Attention for any batch over `pool`."""

    def tuned_attention(self, pool: KvPool, sizes: Sizes) -> AttentionBackend:
        """The runner's attention. May time steps of these sizes to choose the fastest kernels; only
        reads the pool."""

    def runnable(self, model: RunnableModel) -> RunnableModel:
        """The model as the runner calls it."""

    def sampler(self) -> Sampler:
        """The choice of tokens."""

    def captures(self, sizes: Sizes) -> bool:
        """Whether `graphs` captures decodes of these sizes."""

    def graphs(self, model: RunnableModel, pool: KvPool, sizes: Sizes) -> CapturedDecodes | None:
        """Captures decodes of up to `sizes.max_sequences`, if `sizes` and the device allow it. The
        pool must not be in use yet."""

    # Memory

    def num_blocks(self, model: RunnableModel, layout: KvLayout, sizes: Sizes) -> int:
        """The pool's size: as set, or as many blocks as fit and can be used. Raises ConfigError if
        none fits."""

    def report(self, pool: KvPool) -> None:
        """Logs the memory that a ready engine has taken, where that is known."""
