"""When a worker's loop waits, and when it does not."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from engine.step_result import StepResult
from process.clock import Clock
from process.wakeup import Wakeup
from scheduling.batch import Batch
from scheduling.scheduler import SchedulerConfig
from worker.counters import Counters
from worker.host import IDLE_WAIT_MS, WorkerHost


class CountingPoller:
    """Counts waits by their time, and what they found."""

    def __init__(self, poller: zmq.Poller) -> None:
        self._poller = poller
        self.waits: list[tuple[int, int]] = []

    def poll(self, timeout_ms: int) -> None:
        self.waits.append((timeout_ms, len(self._poller.poll(timeout_ms))))


@pytest.fixture
def wakeup() -> Iterator[Wakeup]:
    wakeup = Wakeup()
    yield wakeup
    wakeup.close()


@pytest.fixture
def host(wakeup: Wakeup) -> Iterator[WorkerHost]:
    """Its engine computes nothing, in no time."""
    silent = Wakeup()
    engine = SimpleNamespace(
        scheduler=SimpleNamespace(config=SchedulerConfig(block_size=16), pools=None),
        is_ahead=False,
        run=lambda batch: StepResult(batch, [], [], started=0.0, ended=0.0),
    )
    parts: Any = SimpleNamespace(
        engine=engine,
        transfers=None,
        server=SimpleNamespace(socket=silent.fileno()),
        intake=None,
        admissions=None,
        pool=None,
        reporter=SimpleNamespace(counters=Counters(), dump=None),
        wakeup=wakeup,
        stop=None,
        clock=Clock(),
        announce=None,
        tiers=None,
    )
    settings: Any = SimpleNamespace(
        stall_alarm_s=60.0, drain_grace_s=1.0, cluster_secret="a secret of sixteen"
    )
    host = WorkerHost(settings, "worker-1", parts)
    host.poller = CountingPoller(host.poller)  # type: ignore[assignment]
    yield host
    silent.close()


def test_an_idle_one_waits_until_it_is_woken(host: WorkerHost, wakeup: Wakeup) -> None:
    host.steps.run(Batch())
    wakeup.wake()
    host.wait()
    host.wait()
    assert host.poller.waits == [(IDLE_WAIT_MS, 1), (IDLE_WAIT_MS, 0)]


def test_one_that_computed_something_does_not_and_keeps_the_wake(
    host: WorkerHost, wakeup: Wakeup
) -> None:
    sequence: Any = SimpleNamespace(needs_prompt_logits=False)
    host.steps.run(Batch(decodes=[sequence]))
    wakeup.wake()
    host.wait()
    assert host.poller.waits == []
    host.steps.run(Batch())
    host.wait()
    assert host.poller.waits == [(IDLE_WAIT_MS, 1)]
