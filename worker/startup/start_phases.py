"""The phases of a worker's start, their times, and the check for a stop between two phases.

The main thread enters phases; other threads may read the current one. The start is over once the
lease's thread reports that the worker is registered.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import psutil

from engine.checkpoint.weights import Progress
from process.lifecycle import StopSignal

log = logging.getLogger(__name__)

_SAY_EVERY_S = 1.0
_WORDS = {
    "process": "starting",
    "fetch": "fetching the model",
    "transport": "opening the transport",
    "nodes": "waiting for the other hosts of this worker",
    "kernels": "loading kernels",
    "weights": "loading weights",
    "memory": "taking memory for KV blocks",
    "graphs": "capturing graphs",
    "warm_up": "warming up",
    "registration": "registering",
}
_SILENT = ("memory",)
"""Slow phases that log nothing themselves."""


class PhaseTimes:
    """The time of each phase: one begins where the previous one ends. Phases are those of
    `_WORDS`."""

    def __init__(
        self, phase: str, since: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """The first phase, which began at `since` by `clock`, in seconds."""
        self.phase = phase
        self._since = since
        self._clock = clock
        self._took_s: dict[str, float] = {}

    def enter(self, phase: str) -> None:
        """End the current phase and begin another. Entering a phase again adds to its time."""
        now = self._clock()
        self._took_s[self.phase] = self._took_s.get(self.phase, 0.0) + now - self._since
        self.phase, self._since = phase, now

    def finish(self) -> dict[str, int]:
        """End the last phase; returns milliseconds by phase, in the order of the phases."""
        self.enter(self.phase)
        return {phase: round(took_s * 1e3) for phase, took_s in self._took_s.items()}


def since_process_began() -> PhaseTimes:
    """The times of a start whose first phase, `process`, began when this process was made."""
    age_s = max(0.0, time.time() - psutil.Process().create_time())
    return PhaseTimes("process", time.monotonic() - age_s)


class StartPhases:
    """`phase` is the current one in words. `stop` is the process's request to stop."""

    def __init__(self, stop: StopSignal, times: PhaseTimes) -> None:
        self.stop = stop
        self.phase = _WORDS[times.phase]
        self._times = times

    def enter(self, phase: str) -> None:
        """Begin a phase. Raises Stopped if the process has been told to stop."""
        self.stop.check()
        self._times.enter(phase)
        self.phase = _WORDS[phase]
        if phase in _SILENT:
            log.info("%s", self.phase)

    def finish(self) -> dict[str, int]:
        """End the start: log and return the time of each phase, in milliseconds."""
        took_ms = self._times.finish()
        phases = ", ".join(f"{phase} {took / 1e3:.1f}" for phase, took in took_ms.items())
        log.info("started in %.1f s: %s", sum(took_ms.values()) / 1e3, phases)
        return took_ms

    def weights(self, name: str) -> Progress:
        """A callback for the progress of loading weights, which logs it once a second and at the
        end. It raises Stopped."""
        said_at = time.monotonic()

        def progress(done: int, total: int) -> None:
            nonlocal said_at
            self.stop.check()
            percent, size = 100 * done // max(total, 1), total / 1e6
            self.phase = f"loading weights: {percent} % of {size:.0f} MB"
            now = time.monotonic()
            if done == total or now - said_at >= _SAY_EVERY_S:
                said_at = now
                log.info("loading weights of %s: %d %% of %.0f MB", name, percent, size)

        return progress
