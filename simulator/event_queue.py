"""Virtual time: events in the order of their times.

Events of one moment run in a fixed order, so that a simulation is a function of its inputs:
messages first, in the order in which they were sent, then the ends of steps, by worker.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any

_MESSAGE = -1
"""The place of messages among the events of one moment; that of the end of a step is its worker's
number."""

Action = Callable[..., None]


class EventQueue:
    """The events to come; `now` is the time of the one that runs, in seconds, `num_run` counts
    those that have run."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_run = 0
        self._heap: list[tuple[float, int, int, Action, tuple[Any, ...]]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, time: float, action: Action, *arguments: Any) -> None:
        """Call `action(*arguments)` at `time`, which must not be past."""
        heappush(self._heap, (time, _MESSAGE, next(self._numbers), action, arguments))

    def step_end(self, time: float, worker: int, action: Action, *arguments: Any) -> None:
        """Call `action` at the end of a step of the worker with this number."""
        heappush(self._heap, (time, worker, next(self._numbers), action, arguments))

    def stop(self) -> None:
        """Forget the events to come."""
        self._heap.clear()

    def run(self, on_event: Callable[[], None] = lambda: None) -> None:
        """Run events until none is left; calls `on_event` now and then."""
        heap = self._heap
        while heap:
            self.now, _, _, action, arguments = heappop(heap)
            action(*arguments)
            self.num_run += 1
            if not self.num_run & 0x3FF:
                on_event()
