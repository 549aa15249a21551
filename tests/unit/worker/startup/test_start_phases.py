"""How long each phase of a start took."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import pytest

from cli.fleet import _PROGRESS
from process.lifecycle import StopSignal
from worker.startup.start_phases import PhaseTimes, StartPhases, since_process_began


@pytest.fixture
def stop() -> Iterator[StopSignal]:
    stop = StopSignal(lambda: None)
    yield stop
    stop.close()


def test_a_phase_lasts_until_the_next_and_they_add_up(
    stop: StopSignal, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    now = 12.0
    phases = StartPhases(stop, PhaseTimes("process", since=10.0, clock=lambda: now))
    assert phases.phase == "starting"
    for phase, until in (("kernels", 12.5), ("weights", 20.5), ("kernels", 21.0)):
        phases.enter(phase)
        now = until
    phases.enter("registration")
    now = 21.25
    assert phases.phase == "registering"
    took = {"process": 2000, "kernels": 1000, "weights": 8000, "registration": 250}
    assert phases.finish() == took
    assert list(took) == ["process", "kernels", "weights", "registration"]
    assert caplog.messages == [
        "started in 11.2 s: process 2.0, kernels 1.0, weights 8.0, registration 0.2"
    ]


def test_a_slow_phase_is_told_when_it_begins(
    stop: StopSignal, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    StartPhases(stop, PhaseTimes("weights", since=0.0)).enter("memory")
    assert caplog.messages == ["taking memory for KV blocks"]
    assert _PROGRESS.search(caplog.messages[0]), "baton up shows it"


def test_the_first_phase_begins_when_the_process_is_made() -> None:
    before = time.process_time()
    took_ms = since_process_began().finish()["process"]
    assert took_ms >= 1e3 * before / 4, "a process of few threads lives longer than it computes"
