"""The router's cost of recording: its CPU time per request with recording, divided by that without.

One router serves both, in alternating turns of a few hundred requests, so that neither the
machine's drift nor the router's state favours one of them. The figure is the median of the turns'
ratios, with its 95 % interval by bootstrap.
"""

from __future__ import annotations

import random
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.table import Table

from bench.router.mock_fleet import RouterFleet

TURNS = 60
_SWITCH_S = 0.1
_SAMPLES = 2000
_US_PER_S = 1e6

Load = tuple[str, int, Callable[[], object]]
"""A name, a number of requests, and a function that sends them."""


class SwitchedFleet(RouterFleet):
    """A fleet whose router stops recording, or starts again, at each SIGUSR2."""

    def _router_command(self, name: str) -> list[str]:
        return ["bench.router.unrecorded", *super()._router_command(name)[2:]]

    def switch(self) -> None:
        """Switch the recording."""
        self.signal(self._router, signal.SIGUSR2)
        time.sleep(_SWITCH_S)

    def cpu_us(self, load: Load) -> float:
        """Microseconds of the router's CPU per request of a load."""
        _, count, send = load
        before_s = _cpu_s(self.pids[self._router])
        send()
        return (_cpu_s(self.pids[self._router]) - before_s) / count * _US_PER_S

    @property
    def _router(self) -> str:
        return self.names("router")[0]


def recording_cost(fleet: SwitchedFleet, loads: Sequence[Load], turns: int = TURNS) -> Table:
    """A table: the cost of each load with and without recording, and their ratio."""
    table = Table(title="CPU of the router per request, in microseconds")
    for column in ("load", "recording", "not recording", "ratio, 95 % interval"):
        table.add_column(column, justify="right")
    for load in loads:
        load[2]()
        pairs = [_pair(fleet, load, turn % 2 == 1) for turn in range(turns)]
        low, middle, high = median_interval([on / off for on, off in pairs])
        medians = (statistics.median(each) for each in zip(*pairs, strict=True))
        costs = [f"{each:,.0f}" for each in medians]
        table.add_row(load[0], *costs, f"{middle:.3f} ({low:.3f}-{high:.3f})")
    return table


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median with its 95 % interval: lower bound, median, upper bound."""
    rng = random.Random(1)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(_SAMPLES))
    return medians[_SAMPLES // 40], statistics.median(values), medians[-_SAMPLES // 40]


def _pair(fleet: SwitchedFleet, load: Load, is_off_first: bool) -> tuple[float, float]:
    """The cost with and without recording; afterwards it is on again."""
    if is_off_first:
        fleet.switch()
        off = fleet.cpu_us(load)
        fleet.switch()
        return fleet.cpu_us(load), off
    on = fleet.cpu_us(load)
    fleet.switch()
    off = fleet.cpu_us(load)
    fleet.switch()
    return on, off


def _cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process so far, which the scheduler counts exactly."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(each.read_text().split()[0]) for each in tasks) / 1e9
