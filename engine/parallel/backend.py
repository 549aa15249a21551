"""The backend of one rank: the device's own, with sums over the ranks where inputs are split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.attention.base import AttentionBackend
from engine.backend import Backend, CapturedDecodes, FusedPass, Sizes
from engine.checkpoint.experts_config import ExpertsConfig
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.quantized_blocks import BlockMatrix, Matrix
from engine.device import torch_dtype
from engine.kv_pool import KvPool
from engine.layers.embedding import Embedding
from engine.layers.experts import Experts, ExpertWeights
from engine.layers.linear import LinearLayer, TorchLinear
from engine.layers.ops import LayerOps
from engine.layers.summed import SummedEmbedding, SummedExperts, SummedLinear
from engine.models.parts import ModelParts
from engine.models.runnable import RunnableModel
from engine.parallel.captured import LeadingGraphs, TogetherShard
from engine.parallel.hidden_states import StatesLink
from engine.parallel.leader import LeadingAttention, LeadingModel
from engine.parallel.ranks import Ranks
from engine.sampling.sampler import Sampler
from protocol.layout import SPLIT, KvLayout


class RankBackend:
    """A `Backend` over `own`, that of the rank's device. `tuned_attention` and `runnable` are for
    the leader: passes by them are announced. Passes by `attention` and the model itself are not."""

    def __init__(self, own: Backend, ranks: Ranks, config: ModelConfig) -> None:
        """`config` is that of the rank's part of the model."""
        self._own = own
        self._config = config
        self._ranks = ranks
        self.device, self.dtype, self.kv_dtype = own.device, own.dtype, own.kv_dtype
        self.rounds_weights, self.numerics = own.rounds_weights, own.numerics
        self.shard = ranks.shard
        self._is_split = ranks.shard.size > 1  # each layer
        self.keeps_blocks = own.keeps_blocks

    def orders(self, layout: KvLayout) -> Sequence[str]:
        """See Backend; blocks in the split order have no shards."""
        return [order for order in self._own.orders(layout) if order != SPLIT]

    def linear(self, weight: Matrix, bias: torch.Tensor | None) -> LinearLayer:
        """See Backend."""
        return self._own.linear(weight, bias)

    def output_linear(self, weight: Matrix, bias: torch.Tensor | None) -> LinearLayer:
        """See Backend."""
        own = self._own.output_linear(weight, bias)
        return SummedLinear(own, self._ranks.sums) if self._is_split else own

    def experts(self, config: ExpertsConfig, weights: ExpertWeights) -> Experts:
        """See LayerFactory; each rank has a part of every expert."""
        own = self._own.experts(config, weights)
        return SummedExperts(own, self._ranks.sums) if self._is_split else own

    def logits_linear(self, weight: Matrix) -> LinearLayer:
        """See Backend; only the last stage computes logits."""
        if self.shard.is_last_stage:
            return self._own.logits_linear(weight)
        return TorchLinear(torch.empty(0, 0))

    def embedding(self, weight: torch.Tensor | BlockMatrix) -> Embedding:
        """See Backend; later stages receive hidden states."""
        if self._ranks.before is None:
            own = self._own.embedding(weight)
            if not self._is_split:
                return own
            return SummedEmbedding(own, self._config.own_tokens, self._ranks.sums)
        return ReceivedStates(self._ranks.before, weight.shape[1], torch_dtype(self.dtype))

    def ops(self) -> LayerOps:
        """See Backend."""
        return self._own.ops()

    def fuse(self, parts: ModelParts) -> FusedPass | None:
        """See Backend; None for layers that are split if the kernels do not add up themselves."""
        if not self._is_split:
            return self._own.fuse(parts)
        sums = self._ranks.sums
        return None if sums.address is None else self._own.fuse(replace(parts, sums=sums))

    def attention(self, pool: KvPool) -> AttentionBackend:
        """See Backend."""
        return self._own.attention(pool)

    def tuned_attention(self, pool: KvPool, sizes: Sizes) -> AttentionBackend:
        """See Backend."""
        own = self._own.tuned_attention(pool, sizes)
        return LeadingAttention(own) if self._ranks.leads else own

    def runnable(self, model: RunnableModel) -> LeadingModel:
        """See Backend."""
        return LeadingModel(model, self._ranks)

    def sampler(self) -> Sampler:
        """See Backend."""
        return self._own.sampler()

    def captures(self, sizes: Sizes) -> bool:
        """See Backend."""
        return self._may_capture(sizes) and self._own.captures(sizes)

    def graphs(self, model: RunnableModel, pool: KvPool, sizes: Sizes) -> CapturedDecodes | None:
        """See Backend; all ranks capture, or none does. Stages capture nothing."""
        ranks = self._ranks
        if not self._may_capture(sizes) or not ranks.least(self._own.captures(sizes)):
            return None
        own = self._own.graphs(TogetherShard(model, ranks), pool, sizes)
        assert own is not None
        return LeadingGraphs(own, ranks, self.device) if ranks.leads else own

    def num_blocks(self, model: RunnableModel, layout: KvLayout, sizes: Sizes) -> int:
        """See Backend; the same on every rank. Connects the ranks first."""
        ranks = self._ranks
        ranks.join()
        together = TogetherShard(model, ranks)
        return ranks.least(self._own.num_blocks(together, layout, self._shared(sizes)))

    def _may_capture(self, sizes: Sizes) -> bool:
        """Whether steps may be captured: sums through memory of a host cannot be."""
        is_grouped = self._ranks.groups is not None and self._ranks.groups.is_captured
        return sizes.captures and is_grouped and self.shard.num_stages == 1

    def _shared(self, sizes: Sizes) -> Sizes:
        """On a CPU's host its ranks share its memory; each card has its own."""
        groups = self._ranks.groups
        sharing = len(self._ranks.local) if groups is None else groups.sharing
        return replace(sizes, captures=self._may_capture(sizes), sharing=sharing)

    def report(self, pool: KvPool) -> None:
        """See Backend."""
        self._own.report(pool)


class ReceivedStates:
    """In place of an embedding: the hidden states that the stage before has computed."""

    def __init__(self, link: StatesLink, hidden_size: int, dtype: torch.dtype) -> None:
        self._link = link
        self._hidden_size = hidden_size
        self._dtype = dtype

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Those of the tokens of the step that is announced, [N, hidden]. Raises RankLost."""
        shape = (len(token_ids), self._hidden_size)
        states = torch.empty(shape, dtype=self._dtype, device=token_ids.device)
        self._link.receive(states)
        return states
