"""Runs planned batches, and finds the sequence that is at fault when a step raises."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.engine import Engine
from engine.parallel.sums import RankLost
from engine.runner import TOO_SLOW
from engine.step_result import StepResult
from process.flight_recorder import FlightRecorder
from protocol.flight import FlightKind
from scheduling.batch import Batch
from scheduling.sequence import Sequence
from worker.counters import Count, Counters

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of a planned batch: results, and sequences whose step raised.

    `reason` says why these `failed`. `is_their_fault` means that other sequences of the same batch
    ran, so the failed ones would fail on any worker.
    """

    results: list[StepResult]
    failed: list[Sequence] = field(default_factory=list)
    is_their_fault: bool = False
    reason: str = ""


class StepRunner:
    """The steps of one worker. `is_busy` is True after a step that computed something or runs
    ahead."""

    def __init__(self, engine: Engine, counters: Counters, flight: FlightRecorder) -> None:
        self.is_busy = False
        self._engine = engine
        self._counters = counters
        self._flight = flight

    def run(self, batch: Batch) -> StepOutcome:
        """Run a planned batch. If it raises, run its members one by one, so that only a sequence at
        fault fails. If all fail, or there was only one, the worker may be to blame. With one step
        ahead, either of two steps may be to blame: both are withdrawn, and the next plan runs by
        itself. Raises RankLost: the worker cannot go on."""
        self.is_busy = not batch.is_empty or self._engine.is_ahead
        self._counters.add(Count.PREEMPTIONS, len(batch.preempted))
        for sequence in batch.preempted:
            self._flight.note(FlightKind.PREEMPTED, sequence.key)
        self._counters.add(Count.MASK_WAITS, len(batch.held))
        result, reason = self._try_run(batch, self._engine.run)
        if result is not None:
            return StepOutcome([result])
        if self._engine.try_withdraw():
            return StepOutcome([])
        members = batch.split()
        if len(members) == 1:
            return StepOutcome([], batch.sequences, reason=reason)
        outcomes = [(each, *self._try_run(each, self._engine.run_alone)) for each in members]
        results = [result for _, result, _ in outcomes if result is not None]
        failed = [member.sequences[0] for member, result, _ in outcomes if result is None]
        reason = next((reason for _, _, reason in outcomes if reason), "")
        return StepOutcome(results, failed, is_their_fault=bool(results), reason=reason)

    def _try_run(
        self, batch: Batch, run: Callable[[Batch], StepResult]
    ) -> tuple[StepResult | None, str]:
        """The result, or None and the reason; errors are logged."""
        try:
            result = run(batch)
        except RankLost:
            raise
        except Exception as error:  # the top of a task: an engine error must not end the worker
            log.exception("a step failed: %s", [sequence.key for sequence in batch.sequences])
            self._counters.add(Count.FAILED_STEPS)
            return None, f"its step failed on the worker: {type(error).__name__}"
        if not result.batch.is_empty or result.failed:
            self._note(result)
        return result, ""

    def _note(self, result: StepResult) -> None:
        self._counters.add(Count.STEPS)
        rows, tokens = len(result.batch.decodes), result.batch.num_chunk_tokens
        self._counters.add(Count.DECODE_ROWS, rows)
        span = (result.started, result.ended)
        self._flight.note_span(*span, FlightKind.STEP, number=rows, tokens=tokens)
        if result.batch.chunks:
            budget = self._engine.scheduler.config.chunk_max_tokens
            self._counters.add(Count.CHUNK_BUDGET_TOKENS, budget)
        failures = [failure for _, failure in result.failed]
        self._counters.add(Count.FAILED_ROWS, sum(not each.code for each in failures))
        self._counters.add(Count.SLOW_GRAMMARS, failures.count(TOO_SLOW))
