"""One model on several ranks; each rank holds some of every layer's heads and intermediate width.

Rank 0 leads: it schedules, announces each step to the others, and computes the logits. The others
follow: they run the same step on their shards of weights and KV pool, block for block. Products
over a split dimension (o's over the heads, down's over the intermediate width) give partial sums;
one all-reduce per half layer adds them and the residual. Embedding, norms and lm_head are
replicated on every rank. The loss of a rank breaks the group: ranks that wait for it raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from engine.attention.base import AttentionBackend, Segment, wanted_rows
from engine.checkpoint.config import Shard
from engine.device import to_device
from engine.layers.linear import LinearLayer
from engine.models.decoder import DecoderModel


@dataclass(frozen=True)
class Step:
    """The next step of all ranks: segments and their N tokens."""

    segments: Sequence[Segment]
    tokens: Sequence[int]

    @property
    def positions(self) -> list[int]:
        """Positions of the tokens, [N]."""
        spans = [(s.context_len - s.query_len, s.context_len) for s in self.segments]
        return [position for start, end in spans for position in range(start, end)]

    def encode(self) -> torch.Tensor:
        """The step as one row of int64."""
        sizes = [
            (s.query_len, s.context_len, s.wanted_len, len(s.block_table)) for s in self.segments
        ]
        tables = [block for segment in self.segments for block in segment.block_table]
        flat = [number for size in sizes for number in size]
        return torch.tensor([len(sizes), *flat, *tables, *self.tokens], dtype=torch.int64)

    @staticmethod
    def decode(row: torch.Tensor) -> Step:
        """The inverse of `encode`."""
        numbers = row.tolist()
        segments, at = [], 1 + 4 * numbers[0]
        for index in range(1, at, 4):
            query_len, context_len, num_wanted, size = numbers[index : index + 4]
            table = numbers[at : at + size]
            segments.append(Segment(query_len, context_len, table, num_wanted))
            at += size
        return Step(segments, numbers[at:])


@dataclass(frozen=True)
class Ranks:
    """The ranks of one engine, seen from one of them. `control` broadcasts steps from host memory;
    `data` sums on the ranks' devices: an NCCL group on cards, the same as `control` on CPUs."""

    shard: Shard
    control: dist.ProcessGroup
    data: dist.ProcessGroup

    @property
    def leads(self) -> bool:
        """Whether this rank announces the steps that the others wait for."""
        return self.shard.rank == 0

    def announce(self, step: Step | None) -> None:
        """Broadcast the next step to the followers; None ends their loop."""
        row = torch.empty(0, dtype=torch.int64) if step is None else step.encode()
        dist.broadcast(torch.tensor([len(row)]), group=self.control, group_src=0)
        if len(row):
            dist.broadcast(row, group=self.control, group_src=0)

    def next_step(self) -> Step | None:
        """Wait for the step that the leader announces; None if there are no more."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, group=self.control, group_src=0)
        if not size.item():
            return None
        row = torch.empty(int(size.item()), dtype=torch.int64)
        dist.broadcast(row, group=self.control, group_src=0)
        return Step.decode(row)

    def least(self, number: int) -> int:
        """The minimum of the ranks' numbers; all ranks have to call this."""
        least = torch.tensor([number])
        dist.all_reduce(least, dist.ReduceOp.MIN, self.control)
        return int(least.item())


class SummedLinear:
    """A linear layer whose inputs are split over the ranks: sums the ranks' partial products."""

    def __init__(self, part: LinearLayer, ranks: Ranks) -> None:
        self._part = part
        self._ranks = ranks

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """`x` [N, the rank's inputs] to [N, outputs], plus `add`, which is equal on all ranks."""
        return self._summed(self._part(x, add if self._ranks.leads else None))

    def in_float32(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The same in fp32, without `add`; written to `out` where given."""
        return self._summed(self._part.in_float32(x, out))

    def _summed(self, y: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(y, group=self._ranks.data)
        return y


class LeadingAttention:
    """Rank 0's attention; remembers the planned segments."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.backend = backend
        self.segments: Sequence[Segment] = ()

    def plan(self, segments: Sequence[Segment]) -> None:
        """See AttentionBackend."""
        self.segments = segments
        self.backend.plan(segments)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See AttentionBackend."""
        return self.backend.run(layer, q, k, v)


class LeadingModel:
    """Rank 0's shard of a model for the runner; announces each pass before running it."""

    def __init__(self, model: DecoderModel, ranks: Ranks) -> None:
        self.config = model.config
        self.device = model.device
        self._model = model
        self._ranks = ranks

    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See DecoderModel; `attention` is a LeadingAttention."""
        assert isinstance(attention, LeadingAttention)
        self._ranks.announce(Step(attention.segments, token_ids.tolist()))
        return self._model.hidden(token_ids, positions, attention.backend, rows)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """See DecoderModel; needs no other rank."""
        return self._model.logits(x)


class Follower:
    """A rank that runs the steps that rank 0 announces."""

    def __init__(self, model: DecoderModel, attention: AttentionBackend, ranks: Ranks) -> None:
        self._model = model
        self._attention = attention
        self._ranks = ranks

    def run(self) -> None:
        """Run until the leader announces the end. Raises RuntimeError when a rank is lost."""
        while (step := self._ranks.next_step()) is not None:
            self._attention.plan(step.segments)
            tokens, positions = self._on_device(step.tokens), self._on_device(step.positions)
            wanted = wanted_rows(step.segments)
            rows = None if wanted is None else self._on_device(wanted)
            self._model.hidden(tokens, positions, self._attention, rows)

    def _on_device(self, numbers: Sequence[int]) -> torch.Tensor:
        return to_device(torch.tensor(numbers, dtype=torch.int64), self._model.device)
