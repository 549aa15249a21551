"""A worker's probes: from its start to its drain."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from process.lifecycle import Stopped, StopSignal
from process.metrics.metrics_server import process_registry, start_metrics_server
from worker.probes import WorkerProbes
from worker.startup.start_phases import PhaseTimes, StartPhases

SILENCE_S = 10.0


@dataclass
class Loop:
    turned_at: float = 100.0
    is_draining: bool = False
    is_stalled: bool = False


@dataclass
class Lease:
    is_registered: bool = True


@pytest.fixture
def phases() -> Iterator[StartPhases]:
    stop = StopSignal(lambda: None)
    yield StartPhases(stop, PhaseTimes("process", since=0.0))
    stop.close()


def test_while_it_loads_it_lives_and_says_how_far_it_is(phases: StartPhases) -> None:
    probes = WorkerProbes(phases, SILENCE_S, lambda: 1e9)
    assert probes.live() is None
    assert probes.startup() == probes.ready() == "starting"
    phases.weights("m")(30_000_000, 60_000_000)
    assert probes.startup() == probes.ready() == "loading weights: 50 % of 60 MB"


def test_a_worker_that_is_told_to_stop_loads_no_further_weights(phases: StartPhases) -> None:
    progress = phases.weights("m")
    progress(1, 3)
    phases.stop.request()
    with pytest.raises(Stopped):
        progress(2, 3)
    with pytest.raises(Stopped):
        phases.enter("registration")


def test_it_lives_while_its_loop_turns(phases: StartPhases) -> None:
    now = 100.0
    probes = WorkerProbes(phases, SILENCE_S, lambda: now)
    loop = Loop()
    probes.watch(loop, Lease())
    assert probes.startup() is None
    now = 130.0
    assert probes.live() is None, "a long step"
    now = 131.0
    assert probes.live() == "the step loop has not turned for 31 s"
    loop.turned_at = 131.0
    assert probes.live() is None


def test_it_is_ready_while_it_is_in_the_fleet_and_takes_requests(phases: StartPhases) -> None:
    probes = WorkerProbes(phases, SILENCE_S, lambda: 100.0)
    loop, lease, admission = Loop(), Lease(is_registered=False), ["router-1 has not admitted it"]
    probes.watch(loop, lease)
    probes.add_check(lambda: admission[0] if admission else None)
    assert str(probes.ready()).startswith("not registered")
    lease.is_registered = True
    assert probes.ready() == "router-1 has not admitted it"
    admission.clear()
    assert probes.ready() is None
    loop.is_stalled = True
    assert probes.ready() == "stalled"
    loop.is_draining = True
    assert probes.ready() == "draining"
    assert probes.live() is None


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_each_probe_has_its_path_and_others_are_not_found(host: str, phases: StartPhases) -> None:
    probes = WorkerProbes(phases, SILENCE_S, lambda: 100.0)
    server = start_metrics_server(0, host, process_registry(), probes.by_path())

    def get(path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{host}:{server.port}{path}") as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    try:
        assert get("/startup") == (503, "starting\n")
        assert get("/ready?verbose") == (503, "starting\n")
        assert get("/live") == (200, "ok\n")
        assert "process_cpu_seconds_total" in get("/metrics")[1]
        for path in ("/", "/health", "/metrics/", "/live/x"):
            status, text = get(path)
            assert (status, "/metrics, /live, /ready, /startup" in text) == (404, True)
    finally:
        server.close()
