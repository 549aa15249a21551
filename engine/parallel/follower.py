"""A rank that runs the steps that rank 0 announces."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention.base import AttentionBackend, wanted_rows
from engine.device import to_device
from engine.models.runnable import RunnableModel
from engine.parallel.ranks import Ranks, Step


class Follower:
    """A rank that runs the steps that rank 0 announces."""

    def __init__(self, model: RunnableModel, attention: AttentionBackend, ranks: Ranks) -> None:
        self._model = model
        self._attention = attention
        self._ranks = ranks

    def run(self) -> None:
        """Run until the leader announces the end. Raises RuntimeError when a rank is lost."""
        while (step := self._ranks.next_step()) is not None:
            segments = step.planned()
            wanted = wanted_rows(segments) if self._ranks.shard.is_last_stage else None
            with self._ranks.timed():
                self._attention.plan(segments)
                self._run(step, wanted)

    def _run(self, step: Step, wanted: list[int] | None) -> None:
        """Run a planned step; the next stage wants all rows."""
        ranks = self._ranks
        tokens, positions = self._on_device(step.tokens), self._on_device(step.positions)
        rows = None if wanted is None else self._on_device(wanted)
        hidden = self._model.hidden(tokens, positions, self._attention, rows)
        if wanted is not None and not len(wanted):
            ranks.sums.meet()
        if ranks.after is not None:
            ranks.after.send(hidden)

    def _on_device(self, numbers: Sequence[int]) -> torch.Tensor:
        return to_device(torch.tensor(numbers, dtype=torch.int64), self._model.device)
