"""One loop for both roles: it starts what its role admits, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from protocol.events import WorkerStats
from protocol.messages import AttemptFailed, Generate, NewAttempt, Prefill
from protocol.registration import WorkerState
from scheduling.batch import Batch
from tests.sequences import greedy
from tests.unit.worker_harness import ROUTER, Clock, DecodeBench, PrefillBench
from worker.counters import Count
from worker.step_runner import StepOutcome

Benches = tuple[PrefillBench, DecodeBench]


@pytest.fixture
def benches() -> Iterator[Benches]:
    made = PrefillBench("p", Clock()), DecodeBench("d", Clock())
    yield made
    for bench in made:
        assert bench.scheduler.blocks.num_pinned == 0
        bench.close()


def attempt(kind: type[NewAttempt]) -> NewAttempt:
    return kind(
        request_id="r", attempt=1, token_ids=[1, 2, 3], num_output=0, sampling=greedy(2),
        deadline_ms=9000,
    )  # fmt: skip


def test_a_role_starts_what_it_admits(benches: Benches) -> None:
    for bench, own, other in zip(benches, (Prefill, Generate), (Generate, Prefill), strict=True):
        bench.server.inbox.append((ROUTER, attempt(other)))
        bench.worker.turn()
        assert bench.scheduler.sequences == []
        assert bench.counter(Count.UNEXPECTED_MESSAGES) == 1
        bench.server.inbox.append((ROUTER, attempt(own)))
        bench.worker.turn()
        assert bench.counter(Count.PREFILL_TOKENS) == 3
        bench.role.drop_all()
        bench.worker.turn()


def test_a_worker_that_is_to_stop_starts_nothing(benches: Benches) -> None:
    for bench, own in zip(benches, (Prefill, Generate), strict=True):
        bench.stop.request()
        assert not bench.host.lifecycle.is_finished(num_jobs=0), "it turns once more"
        assert bench.host.lifecycle.is_finished(num_jobs=0)
        bench.server.inbox.append((ROUTER, attempt(own)))
        bench.worker.turn()
        (answer,) = bench.take_sent()
        assert isinstance(answer, AttemptFailed)
        assert (answer.retryable, answer.reason) == (True, "the worker stops")
        assert bench.announced == [WorkerState.DRAINING]
        assert bench.scheduler.sequences == []


def test_a_request_is_in_a_report_before_its_first_step_ends(benches: Benches) -> None:
    """A step may be long, and other routers should know meanwhile what waits here."""
    for bench, own in zip(benches, (Prefill, Generate), strict=True):
        told: list[int] = []
        run = bench.steps.run

        def noting(
            batch: Batch,
            told: list[int] = told,
            bench: PrefillBench | DecodeBench = bench,
            run: Callable[[Batch], StepOutcome] = run,
        ) -> StepOutcome:
            (stats,) = [each for each in bench.published if isinstance(each, WorkerStats)]
            told.append(stats.num_running)
            return run(batch)

        bench.steps.run = noting  # type: ignore[method-assign]
        bench.server.inbox.append((ROUTER, attempt(own)))
        bench.worker.turn()
        assert told == [1]
        bench.role.drop_all()
        bench.worker.turn()
