"""Virtual time: events in the order of their times.

Events of one moment run in a fixed order, so that a simulation is a function of its inputs:
arrivals first, then messages in the order in which they were sent, then the ends of steps, by
worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

_ARRIVAL, _MESSAGE = -2, -1
"""The places of arrivals and messages among the events of one moment; that of the end of a step is
its worker's number."""

Action = Callable[..., None]
Arrival = tuple[float, Action, tuple[Any, ...]]
"""Its time, and what is called then with which arguments."""


class EventQueue:
    """The events to come; `now` is the time of the one that runs, in seconds, `num_run` counts
    those that have run."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_run = 0
        self._heap: list[tuple[float, int, int, Action, tuple[Any, ...]]] = []
        self._numbers = count()
        self._period_s = self._next_beat = inf
        self._on_beat: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, time: float, action: Action, *arguments: Any) -> None:
        """Call `action(*arguments)` at `time`, which must not be past."""
        heappush(self._heap, (time, _MESSAGE, next(self._numbers), action, arguments))

    def arrive(self, arrivals: Iterable[Arrival]) -> None:
        """Let events arrive, in the order of their times. Only the next one is queued at a time,
        because a short queue is quicker."""
        self._arrive_next(iter(arrivals))

    def step_end(self, time: float, worker: int, action: Action, *arguments: Any) -> None:
        """Call `action` at the end of a step of the worker with this number."""
        heappush(self._heap, (time, worker, next(self._numbers), action, arguments))

    def every(self, period_s: float, action: Callable[[], None]) -> None:
        """Call `action()` after each period, as long as there are events to come. `action` must not
        add any for later than the next call, or there is no end of events."""
        self._period_s = self._next_beat = period_s
        self._on_beat = action

    def _arrive_next(self, arrivals: Iterator[Arrival]) -> None:
        for time, *others in arrivals:
            event = (time, _ARRIVAL, next(self._numbers), self._arrive, (arrivals, *others))
            heappush(self._heap, event)
            break

    def _beat(self) -> None:
        self.now = self._next_beat
        self._next_beat += self._period_s
        self._on_beat()

    def _arrive(
        self, arrivals: Iterator[Arrival], action: Action, arguments: tuple[Any, ...]
    ) -> None:
        self._arrive_next(arrivals)
        action(*arguments)

    def stop(self) -> None:
        """Forget the events to come."""
        self._heap.clear()

    def run(self, on_event: Callable[[], None] = lambda: None) -> None:
        """Run events until none is left; calls `on_event` now and then."""
        heap = self._heap
        while heap:
            if heap[0][0] >= self._next_beat:
                self._beat()
                continue
            self.now, _, _, action, arguments = heappop(heap)
            action(*arguments)
            self.num_run = num_run = self.num_run + 1
            if not num_run & 0x3FF:
                on_event()
