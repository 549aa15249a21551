"""The common part of a card's backends with attention kernels: Triton's operations, and graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from engine.attention.base import AttentionBackend
from engine.attention.groups import joined
from engine.attention.pool_layers import PoolLayers
from engine.backend import CapturedDecodes, Sizes
from engine.gpu.backend import CardBackend
from engine.gpu.graphs import Capture, CudaCapture, DecodeGraphs, graph_sizes
from engine.gpu.memory import Graphs
from engine.kv_pool import KvPool
from engine.layers.ops import LayerOps
from engine.models.runnable import RunnableModel
from engine.sampling.chosen_tokens import LogTotals
from engine.sampling.sampler import Sampler
from engine.sampling.top_p import FindCut

_GROUPED_PRODUCTS = (9, 10)
"""Compute capabilities (major) on which torch multiplies bf16 experts in one kernel."""


class TritonBackend(CardBackend, ABC):
    """A card's backend with attention that can be captured in graphs."""

    @property
    def graph_wrappers(self) -> int:
        """Wrappers of FlashInfer in each graph."""
        return 0

    @abstractmethod
    def fixed_decodes(
        self, pool: KvPool, max_sequences: int, max_blocks: int
    ) -> Callable[[int], AttentionBackend]:
        """A factory of attention for a fixed number of decodes over one group, for capture in
        graphs. All share buffers for `max_sequences` contexts with `max_blocks` blocks in total."""

    def ops(self) -> LayerOps:
        """See Backend; row by row."""
        from engine.gpu.ops import TritonOps  # needs Triton

        return TritonOps(self._config.hidden_act, self._config.rms_norm_eps, self._dtype)

    def find_cut(self) -> FindCut:
        """The search for the cut of top-p, in one kernel."""
        from engine.gpu.ops import lowest_kept  # needs Triton

        return lowest_kept

    def log_totals(self) -> LogTotals | None:
        """A function that computes the log-sum-exp of the rows whose log-probabilities are
        reported; None: the sampler computes it."""
        return None

    def sampler(self) -> Sampler:
        """See Backend."""
        vocab_size = self._config.vocab_size
        return Sampler(vocab_size, find_cut=self.find_cut(), log_totals=self.log_totals())

    def layers(self, pool: KvPool) -> PoolLayers:
        """The layers of one group in `pool`, as views for the kernels."""
        config = self._config
        return PoolLayers(pool, self.windows(pool), config.num_heads, self._dtype, config.scoring)

    def captures(self, sizes: Sizes) -> bool:
        """See Backend."""
        return sizes.captures and self._is_captured()

    def graphs(self, model: RunnableModel, pool: KvPool, sizes: Sizes) -> CapturedDecodes | None:
        """See Backend."""
        if not self.captures(sizes):
            return None
        size, most_blocks = sizes.max_sequences, sizes.most_blocks(pool.layout)
        makers = [self.fixed_decodes(view, size, most_blocks) for view in pool.groups]

        def make_attention(num_decodes: int) -> AttentionBackend:
            return joined(pool, [make(num_decodes) for make in makers])

        return DecodeGraphs(model, make_attention, graph_sizes(size), self.capture())

    def planned_graphs(self, sizes: Sizes) -> Graphs:
        """See CardBackend."""
        num_graphs = len(graph_sizes(sizes.max_sequences)) if self.captures(sizes) else 0
        return Graphs(num_graphs, self.graph_wrappers)

    def _is_captured(self) -> bool:
        """Whether passes run without the host. On other cards, torch's grouped product reads the
        ends of the experts' rows on the host."""
        if self._config.experts is None:
            return True
        has_product = torch.cuda.get_device_capability(self.device)[0] in _GROUPED_PRODUCTS
        return has_product and self._dtype == torch.bfloat16

    def capture(self) -> Capture:
        """The function that captures a pass as a graph."""
        return CudaCapture()
