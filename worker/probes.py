"""A worker's answers to an orchestrator's probes: has it started, is it alive, is it ready?

Answers are served beside the metrics, even before the model loads. Probes run in the server's
threads and only read what the worker's own threads have set. Other conditions of readiness, such as
the routers' admission, are added as checks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

from prometheus_client import CollectorRegistry

from process.metrics.metrics_server import Probe, process_registry, start_metrics_server
from process.sockets.host_names import bracketed
from worker.settings import WorkerSettings
from worker.startup.start_phases import StartPhases

log = logging.getLogger(__name__)

ReadinessCheck = Probe
_STUCK_AFTER_SILENCES = 3
"""The step loop counts as stuck after this many times `peer_silence_s`."""


class StepLoop(Protocol):
    """A running worker; implemented by `Lifecycle`."""

    @property
    def turned_at(self) -> float: ...
    @property
    def is_draining(self) -> bool: ...
    @property
    def is_stalled(self) -> bool: ...


class Lease(Protocol):
    """A registration; implemented by `WorkerLease`."""

    @property
    def is_registered(self) -> bool: ...


class WorkerProbes:
    """The three probes. A probe returns None if it passes, otherwise the reason why it fails.

    `peer_silence_s` is longer than the worker's longest step.
    """

    def __init__(
        self,
        phases: StartPhases,
        peer_silence_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._phases = phases
        self._longest_turn_s = _STUCK_AFTER_SILENCES * peer_silence_s
        self._clock = clock
        self._running: tuple[StepLoop, Lease] | None = None
        self._checks: list[ReadinessCheck] = []

    def watch(self, loop: StepLoop, lease: Lease) -> None:
        """Record that the worker has started; from now on, probe this loop and this lease."""
        self._running = (loop, lease)

    def add_check(self, check: ReadinessCheck) -> None:
        """Add a check: the worker is ready only while it returns None. The probes' threads call it,
        so it must not block."""
        self._checks.append(check)

    def by_path(self) -> dict[str, Probe]:
        """The probes, by the path at which they are served."""
        return {"/live": self.live, "/ready": self.ready, "/startup": self.startup}

    def startup(self) -> str | None:
        """Whether the worker has loaded its model."""
        return None if self._running is not None else self._phases.phase

    def live(self) -> str | None:
        """Whether the step loop is turning. Passes during startup, when there is no loop yet."""
        if self._running is None:
            return None
        still_s = self._clock() - self._running[0].turned_at
        if still_s > self._longest_turn_s:
            return f"the step loop has not turned for {still_s:.0f} s"
        return None

    def ready(self) -> str | None:
        """Whether the worker is in the fleet and takes requests."""
        if self._running is None:
            return self._phases.phase
        loop, lease = self._running
        if loop.is_draining:
            return "draining"
        if loop.is_stalled:
            return "stalled"
        if not lease.is_registered:
            return (
                "not registered: the store is unreachable, or another worker holds this worker_id"
            )
        return next((reason for check in self._checks if (reason := check()) is not None), None)


def serve_probes(
    settings: WorkerSettings, probes: WorkerProbes, stack: ExitStack
) -> CollectorRegistry:
    """Serve the probes and the metrics on the ports that the settings give. Returns the registry
    of the metrics. Raises ConfigError."""
    registry = process_registry()
    if settings.metrics_port is not None:
        host = settings.metrics_host or settings.host
        server = start_metrics_server(settings.metrics_port, host, registry, probes.by_path())
        stack.callback(server.close)
        log.info("metrics and probes on http://%s:%d", bracketed(host), server.port)
    if settings.probe_port is not None:
        only_probes = start_metrics_server(
            settings.probe_port, settings.host, None, probes.by_path()
        )
        stack.callback(only_probes.close)
        log.info("probes on http://%s:%d", bracketed(settings.host), only_probes.port)
    return registry
