"""The result of a step for the engine's owner, and how a step is committed.

A row from which no token can be chosen fails its own sequence only; the batch omits that sequence.
It also omits a sequence whose mask was late, which is computed again in a later step.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from engine.fences import PASSED, Fence
from engine.runner import NOT_FINITE, Row, RowFailure, RowLate, SampledToken
from engine.sampling.grammar_matcher import GrammarMatcher
from protocol.sampling import TokenLogprobs
from scheduling.batch import Batch, Chunk, Produced
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence


@dataclass(frozen=True)
class Stored:
    """A committed chunk, whose keys and values are in the pool once `fence` is passed."""

    chunk: Chunk
    fence: Fence


@dataclass(frozen=True)
class StepResult:
    """A finished step: its batch, the tokens it produced, and its start and end time (s). `stored`
    are the chunks committed since the last result; some of them may belong to a later step, which
    is under way.

    `failed` lists the sequences that got no token, with the reason. They are not part of `batch`,
    nothing was committed for them, and their owner must end them. The blocks of sequences whose
    logits were not finite are not cached.
    """

    batch: Batch
    produced: list[Produced]
    logprobs: list[TokenLogprobs | None]
    started: float
    ended: float
    failed: list[tuple[Sequence, RowFailure]] = field(default_factory=list)
    stored: list[Stored] = field(default_factory=list)


def commit(
    scheduler: Scheduler,
    batch: Batch,
    rows: Seq[Row],
    started: float,
    ended: float,
) -> StepResult:
    """Commit a step that ran from `started` to `ended` (s) and is no longer under way; `rows`
    belong to `batch.sampled`."""
    outcomes = list(zip(batch.sampled, rows, strict=True))
    failed = [(s, row) for s, row in outcomes if isinstance(row, RowFailure)]
    for sequence, failure in failed:
        if failure == NOT_FINITE:  # the cause may be in the sequence's blocks
            scheduler.withdraw(sequence)
    batch = batch.without(s for s, row in outcomes if isinstance(row, RowFailure | RowLate))
    sampled = [row for row in rows if isinstance(row, SampledToken)]
    token_ids = [each.token_id for each in sampled]
    _give_to_grammars(batch.sampled, token_ids)
    produced = scheduler.commit(batch, token_ids, ended)
    logprobs = [_wire_logprobs(s) for s in sampled]
    stored = [Stored(chunk, PASSED) for chunk in batch.chunks]
    return StepResult(batch, produced, logprobs, started, ended, failed, stored)


def _give_to_grammars(sequences: Seq[Sequence], token_ids: Seq[int]) -> None:
    """Let grammars consume their sequences' tokens together, before they are committed one by
    one."""
    chosen = [
        (sequence.grammar, token_id)
        for sequence, token_id in zip(sequences, token_ids, strict=True)
        if isinstance(sequence.grammar, GrammarMatcher)
    ]
    if chosen:
        chosen[0][0].follower.give(chosen)


def _wire_logprobs(sampled: SampledToken) -> TokenLogprobs | None:
    if sampled.logprob is None:
        return None
    return TokenLogprobs(sampled.logprob, tuple(sampled.top))
