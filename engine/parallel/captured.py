"""Decodes that all ranks of a stage have captured as graphs, including their sums.

Ranks capture the same passes in the same order, and replay the one that the leader announces. A
captured pass begins with the leader's tokens, which only the leader's card may know.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention.base import AttentionBackend, Segment
from engine.backend import CapturedDecodes
from engine.models.runnable import RunnableModel, WholeStep
from engine.parallel.ranks import Ranks, Replay, Step
from engine.parallel.sums import RankLost
from engine.parallel.vocabulary import gather_parts
from engine.sampling.chosen_tokens import LateTokens


class TogetherShard:
    """A rank's shard of a model for passes that all ranks run together without an announcement, and
    with all their exchanges: passes that measure memory, and passes that graphs capture."""

    def __init__(self, model: RunnableModel, ranks: Ranks) -> None:
        self.config = model.config
        self.device = model.device
        self.dtype = model.dtype
        self._model = model
        self._ranks = ranks

    @torch.inference_mode()
    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See RunnableModel; `token_ids` become the leader's."""
        if self._ranks.shares_tokens:
            self._ranks.sums.share(token_ids)
        states = self._model.hidden(token_ids, positions, attention, rows)
        if self._ranks.after is not None:
            self._ranks.after.send(states)
        return states

    @torch.inference_mode()
    def logits(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See RunnableModel; all ranks of a stage have the same `x`. On all ranks except the
        leader, the result has no meaning."""
        ranks, shape = self._ranks, (len(x), self.config.vocab_size)
        whole = x.new_zeros(shape, dtype=torch.float32) if out is None else out
        if ranks.shard.is_last_stage:
            own = whole if ranks.leads else None
            gather_parts(self._model, x, ranks.sums, ranks.shard.size, own)
        return whole

    def whole_step(self, attention: AttentionBackend) -> WholeStep | None:
        """See RunnableModel; these passes are not whole steps."""
        return None


class LeadingGraphs:
    """The leader's graphs, which announce each replay."""

    def __init__(self, own: CapturedDecodes, ranks: Ranks, device: torch.device) -> None:
        self._own = own
        self._ranks = ranks
        self._device = device

    @property
    def max_sequences(self) -> int:
        """See CapturedDecodes."""
        return self._own.max_sequences

    def padded(self, num_sequences: int) -> int:
        """See CapturedDecodes."""
        return self._own.padded(num_sequences)

    def logits(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        segments: Sequence[Segment],
        late: LateTokens | None = None,
    ) -> torch.Tensor:
        """See CapturedDecodes. Raises RankLost."""
        self._ranks.announce(Replay(self._own.padded(len(tokens)), Step.of(segments, [])))
        with self._ranks.passing(self._device):
            return self._own.logits(tokens, positions, segments, late)


def replay(graphs: CapturedDecodes, message: Replay) -> None:
    """Replay a pass that the leader has announced. Raises RankLost if this rank has another one."""
    segments, positions = message.step.planned(), message.step.positions
    if graphs.padded(len(positions)) != message.size:
        raise RankLost(f"rank 0 replays {message.size} decodes, which are not captured here")
    graphs.logits([0] * len(positions), positions, segments)
