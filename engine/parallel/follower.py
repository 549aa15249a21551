"""A rank that runs the steps that rank 0 announces."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention.base import AttentionBackend, wanted_rows
from engine.backend import CapturedDecodes
from engine.device import fence_of, to_device
from engine.models.runnable import RunnableModel, WholeStep
from engine.parallel.blocks_under_way import BlocksUnderWay
from engine.parallel.captured import replay
from engine.parallel.ranks import Logits, Ranks, Replay, Step
from engine.parallel.vocabulary import gather_likeliest, gather_logits


class Follower:
    """A rank that runs the steps that rank 0 announces; `step` runs those that choose, `graphs`
    those that all ranks have captured. `under_way` are the blocks that its steps write to, for
    those who read this rank's pool; None if only the leader does."""

    def __init__(
        self,
        model: RunnableModel,
        attention: AttentionBackend,
        ranks: Ranks,
        under_way: BlocksUnderWay | None = None,
        step: WholeStep | None = None,
        graphs: CapturedDecodes | None = None,
    ) -> None:
        self.under_way = under_way
        self._model = model
        self._attention = attention
        self._ranks = ranks
        self._step = step
        self._graphs = graphs

    def run(self) -> None:
        """Run until the leader announces the end. Raises RuntimeError when a rank is lost."""
        while (message := self._ranks.next_message()) is not None:
            with self._ranks.timed():
                if isinstance(message, Logits):
                    self._give_logits(message.num_rows)
                else:
                    self._store(message)

    def _store(self, message: Step | Replay) -> None:
        """Run a step, which writes to the pool."""
        if self.under_way is not None:
            self.under_way.begin(message.step if isinstance(message, Replay) else message)
        if isinstance(message, Replay):
            assert self._graphs is not None
            replay(self._graphs, message)
        elif message.chooses:
            self._choose(message)
        else:
            self._run(message)
        if self.under_way is not None:
            self.under_way.end(fence_of(self._model.device))

    def _run(self, step: Step) -> None:
        """Run a step; the next stage wants all rows."""
        ranks, segments = self._ranks, step.planned()
        wanted = wanted_rows(segments) if ranks.shard.is_last_stage else None
        self._attention.plan(segments)
        tokens, positions = self._tokens(step), self._on_device(step.positions)
        rows = None if wanted is None else self._on_device(wanted)
        hidden = self._model.hidden(tokens, positions, self._attention, rows)
        if wanted is not None and not len(wanted):
            ranks.sums.meet()
        if ranks.after is not None:
            ranks.after.send(hidden)

    def _choose(self, step: Step) -> None:
        """Run a step, and give the likeliest of this rank's tokens."""
        assert self._step is not None
        segments = step.planned()
        self._attention.plan(segments)
        own = self._step(step.tokens, step.positions, wanted_rows(segments))
        gather_likeliest(own, self._ranks.sums, self._ranks.shard.size)

    def _give_logits(self, num_rows: int) -> None:
        model, ranks = self._model, self._ranks
        shape = (num_rows, model.config.hidden_size)
        x = torch.empty(shape, dtype=model.dtype, device=model.device)
        gather_logits(model, x, ranks.sums, ranks.shard.size)

    def _tokens(self, step: Step) -> torch.Tensor:
        if not self._ranks.shares_tokens:
            return self._on_device(step.tokens)
        shape = (len(step.positions),)
        tokens = torch.empty(shape, dtype=torch.int64, device=self._model.device)
        self._ranks.sums.share(tokens)
        return tokens

    def _on_device(self, numbers: Sequence[int]) -> torch.Tensor:
        return to_device(torch.tensor(numbers, dtype=torch.int64), self._model.device)
