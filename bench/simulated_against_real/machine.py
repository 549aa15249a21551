"""How much of the machine other programs took while we measured, from Linux's counters."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import psutil

from bench.tools.machine import processor_name

MOST_FOREIGN = 0.05
"""The largest share of the cores' time that other programs may use. Above it, a measurement is not
meaningful."""


@dataclass(frozen=True)
class Usage:
    """Shares of the time of all cores: what our processes used, what others did, and what the
    host of a virtual machine kept (`stolen`)."""

    ours: float
    foreign: float
    stolen: float

    @property
    def is_starved(self) -> bool:
        """Whether others took so much that nothing can be judged."""
        return self.foreign + self.stolen > MOST_FOREIGN


class MachineWatch:
    """Counts from its creation on. Our processes are this one and all that it has started."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._cores = os.cpu_count() or 1
        self._machine, self._stolen = _machine_s()
        self._ours = _ours_s()

    def usage(self) -> Usage:
        """The shares since the begin."""
        seconds = (time.perf_counter() - self._began) * self._cores
        machine, stolen = _machine_s()
        ours = sum(now - self._ours.get(process, 0.0) for process, now in _ours_s().items())
        busy = machine - self._machine
        return Usage(
            ours / seconds, max(0.0, busy - ours) / seconds, (stolen - self._stolen) / seconds
        )


def machine_name() -> str:
    """Processor, cores and load of the machine, for people."""
    load = ", ".join(f"{each:.2f}" for each in os.getloadavg())
    return f"{processor_name()}, load {load}"


def _machine_s() -> tuple[float, float]:
    """Seconds that all cores were busy, and that were stolen."""
    times = psutil.cpu_times()
    busy = times.user + times.nice + times.system
    busy += getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0)
    return busy, getattr(times, "steal", 0.0)


def _ours_s() -> dict[tuple[int, float], float]:
    """CPU seconds of our processes."""
    found = {}
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        try:
            times = process.cpu_times()
            found[process.pid, process.create_time()] = times.user + times.system
        except psutil.Error:
            continue
    return found
