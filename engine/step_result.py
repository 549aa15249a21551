"""A step that ran, as its owner hears of it, and how it is committed.

A row from which nothing could be chosen fails its sequence alone, which is left out of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from engine.runner import NOT_FINITE, RowFailure
from engine.sampling.chosen_tokens import SampledToken
from protocol.sampling import TokenLogprobs
from scheduling.batch import Batch, Produced
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence


@dataclass(frozen=True)
class StepResult:
    """A step that ran: its batch, the tokens it produced, and its two clock readings (s); `ended`
    is when it was launched if a card may still compute it.

    `failed` are sequences from whose logits nothing could be chosen, and why. They are not part of
    `batch`, nothing of theirs was committed, and their owner has to end them. Blocks of those whose
    logits were not finite are offered to nobody.
    """

    batch: Batch
    produced: list[Produced]
    logprobs: list[TokenLogprobs | None]
    started: float
    ended: float
    failed: list[tuple[Sequence, RowFailure]] = field(default_factory=list)


def commit(
    scheduler: Scheduler,
    batch: Batch,
    rows: Seq[SampledToken | RowFailure],
    started: float,
    ended: float,
) -> StepResult:
    """Record a step that ran from `started` to `ended` (s); `rows` are those of `batch.sampled`."""
    outcomes = zip(batch.sampled, rows, strict=True)
    failed = [(s, row) for s, row in outcomes if isinstance(row, RowFailure)]
    for sequence, failure in failed:
        if failure == NOT_FINITE:  # what made it so may lie in its blocks
            scheduler.blocks.withdraw(sequence.block_table)
    batch = batch.without(sequence for sequence, _ in failed)
    sampled = [row for row in rows if isinstance(row, SampledToken)]
    produced = scheduler.commit(batch, [s.token_id for s in sampled], ended)
    logprobs = [_wire_logprobs(s) for s in sampled]
    return StepResult(batch, produced, logprobs, started, ended, failed)


def _wire_logprobs(sampled: SampledToken) -> TokenLogprobs | None:
    if sampled.logprob is None:
        return None
    return TokenLogprobs(sampled.logprob, tuple(sampled.top))
