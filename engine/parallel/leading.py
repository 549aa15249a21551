"""Rank 0's model and attention for the runner, which announce each pass to the other ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention.base import AttentionBackend, Segment
from engine.models.runnable import RunnableModel
from engine.parallel.ranks import Ranks, Step
from engine.parallel.sums import RankLost
from engine.rank_times import RankTime


class LeadingAttention:
    """Rank 0's attention; remembers the planned segments."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.backend = backend
        self.segments: Sequence[Segment] = ()

    def plan(self, segments: Sequence[Segment]) -> None:
        """See AttentionBackend."""
        self.segments = segments
        self.backend.plan(segments)


class LeadingModel:
    """Rank 0's shard of a model for the runner; announces each pass before running it, unless it
    is announced already."""

    def __init__(self, model: RunnableModel, ranks: Ranks) -> None:
        self._num_announced = 0
        self.config = model.config
        self.device = model.device
        self.dtype = model.dtype
        self._model = model
        self._ranks = ranks

    def announce_ahead(self, segments: Sequence[Segment], tokens: list[int]) -> None:
        """Announce a pass whose `hidden` follows, after those of passes announced before."""
        self._ranks.announce(Step.of(segments, tokens))
        self._num_announced += 1

    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See RunnableModel; `attention` is a LeadingAttention.

        After it all ranks have stored the keys and values: they came before the last layer's sums,
        and where no row is wanted, the last layer has none. Raises RankLost, also for errors of
        this rank: others are in the midst of the pass, and would add up parts of different ones.
        """
        assert isinstance(attention, LeadingAttention)
        if self._num_announced:
            self._num_announced -= 1
        else:
            self._ranks.announce(Step.of(attention.segments, token_ids.tolist()))
        try:
            with self._ranks.timed():
                hidden = self._model.hidden(token_ids, positions, attention.backend, rows)
                if rows is not None and not len(rows):
                    self._ranks.sums.meet()
        except RankLost:
            raise
        except Exception as error:
            raise RankLost(f"rank 0 cannot compute a step: {error!r}") from error
        return hidden

    def rank_times(self) -> list[RankTime]:
        """Those of all ranks so far."""
        return self._ranks.times.totals()

    def logits(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See RunnableModel; needs no other rank."""
        return self._model.logits(x, out)
