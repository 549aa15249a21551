"""Parts of a worker in a test: a host that waits for nothing, counted steps, a card's pool."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from engine.kv_pool import block_digest
from protocol.layout import KvLayout
from scheduling.batch import Batch
from tests.unit.fake_model import FakeModel
from worker.host import WorkerHost
from worker.step_runner import StepOutcome, StepRunner


class PatientHost(WorkerHost):
    """A host that waits for nothing."""

    def wait(self) -> None:
        self._wakeup.clear()


class CountedSteps(StepRunner):
    """Counts the tokens of chunks, by request and attempt."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.computed: Counter[tuple[str, int]] = Counter()

    def run(self, batch: Batch) -> StepOutcome:
        outcome = super().run(batch)
        for result in outcome.results:
            for chunk in result.batch.chunks:
                self.computed[chunk.sequence.key] += chunk.num_tokens
        return outcome


@dataclass
class CardPool:
    """A pool of which a copy to the host waits for the steps launched so far."""

    model: FakeModel
    memories: list[torch.Tensor]  # by group
    layout: KvLayout
    others = ()
    has_all_ranks = True

    @property
    def groups(self) -> list[CardPool]:
        return [
            CardPool(self.model, [memory], self.layout.of_group(group))
            for group, memory in enumerate(self.memories)
        ]

    def digest(self, block: int) -> bytes:
        return block_digest(self.tensor[block])

    @property
    def tensor(self) -> torch.Tensor:
        self.model.wait()
        return self.memories[0]
