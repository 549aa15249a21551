"""A rank that runs the steps that rank 0 announces."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention.base import AttentionBackend, wanted_rows
from engine.device import to_device
from engine.models.runnable import RunnableModel
from engine.parallel.ranks import Ranks


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
            self._attention.plan(segments)
            tokens, positions = self._on_device(step.tokens), self._on_device(step.positions)
            wanted = wanted_rows(segments)
            rows = None if wanted is None else self._on_device(wanted)
            self._model.hidden(tokens, positions, self._attention, rows)
            if wanted is not None and not len(wanted):
                self._ranks.sums.meet()

    def _on_device(self, numbers: Sequence[int]) -> torch.Tensor:
        return to_device(torch.tensor(numbers, dtype=torch.int64), self._model.device)
