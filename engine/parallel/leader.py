"""Rank 0's model and attention for the runner, which announce each pass to the other ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from engine.attention.base import AttentionBackend, Segment
from engine.models.runnable import Likeliest, RunnableModel, WholeStep
from engine.parallel.ranks import Logits, Ranks, Step
from engine.parallel.vocabulary import gather_likeliest, gather_logits
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
    is announced already. Methods raise RankLost for every error (see `Ranks.passing`)."""

    def __init__(self, model: RunnableModel, ranks: Ranks) -> None:
        self._ahead: deque[Step] = deque()
        self.config = model.config
        self.device = model.device
        self.dtype = model.dtype
        self._model = model
        self._ranks = ranks

    def announce_ahead(self, segments: Sequence[Segment], tokens: list[int]) -> None:
        """Announce a pass whose `hidden` follows, after those of passes announced before."""
        step = Step.of(segments, tokens)
        self._ranks.announce_ahead(step)
        self._ahead.append(step)

    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See RunnableModel; `attention` is a LeadingAttention.

        When it returns, all ranks have stored the keys and values: each stores those of the last
        layer before that layer's sums. If no row is wanted, there are no such sums, so ranks meet.
        """
        assert isinstance(attention, LeadingAttention)
        ranks = self._ranks
        if self._ahead:
            ranks.announce_here(self._ahead.popleft())
        else:
            tokens = [] if ranks.shares_tokens else token_ids.tolist()
            ranks.announce(Step.of(attention.segments, tokens))
        with ranks.passing(self.device):
            if ranks.shares_tokens:
                ranks.sums.share(token_ids)
            hidden = self._model.hidden(token_ids, positions, attention.backend, rows)
            if rows is not None and not len(rows):
                ranks.sums.meet()
        return hidden

    @torch.inference_mode()
    def logits(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See RunnableModel."""
        sums, size = self._ranks.sums, self._ranks.shard.size
        if size == 1:
            return self._model.logits(x, out)
        if not len(x):
            return torch.empty((0, self.config.vocab_size), device=x.device)
        self._ranks.announce_here(Logits(len(x)))
        with self._ranks.passing(self.device):
            found = gather_logits(self._model, x.contiguous(), sums, size, out)
        assert found is not None
        return found

    def whole_step(self, attention: AttentionBackend) -> WholeStep | None:
        """See RunnableModel; None for a stage."""
        assert isinstance(attention, LeadingAttention)
        own = self._model.whole_step(attention.backend)
        if own is None:
            return None

        def step(
            token_ids: Sequence[int], positions: Sequence[int], rows: Sequence[int] | None
        ) -> Likeliest:
            self._ranks.announce(Step.of(attention.segments, list(token_ids), chooses=True))
            with self._ranks.passing(self.device):
                own_tokens = own(token_ids, positions, rows)
                found = gather_likeliest(own_tokens, self._ranks.sums, self._ranks.shard.size)
            assert found is not None
            return found

        return step

    def rank_times(self) -> list[RankTime]:
        """The times of all ranks so far; none on cards, whose hosts only queue their work."""
        return [] if self.device.type == "cuda" else self._ranks.times.totals()
