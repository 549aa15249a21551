"""Threads that follow grammars and compute their masks, beside the thread that runs the steps.

A lane is the work on copies of one compiled grammar, which share a lock: one thread at a time takes
it. A lane whose work is not done within the budget of a step is slow. Slow lanes share a thread of
low priority, and wait only for each other. A quick thread takes the work of all quick lanes at
once, so that a step wakes one thread. Knows no grammars: `compute` does the work. Invariant: a
piece of work is in one queue or one thread.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

_NUM_QUICK = 2
"""Two threads, so that the other one serves the other grammars if a quick grammar becomes slow."""
_SLOW_NICE = 10


@dataclass(eq=False, slots=True)
class Lane:
    """The work on one compiled grammar: the `waiting` pieces, the cost of the last piece
    (`cost_s`), the number of quick pieces in a row (`num_quick`, kept by the owner), and whether a
    thread has taken the lane (`is_taken`) or the lane is in a queue (`is_queued`)."""

    cost_s: float = 0.0
    num_quick: int = 0
    waiting: deque[Any] = field(default_factory=deque)
    is_taken: bool = False
    is_queued: bool = False


class Work(Protocol):
    """One piece of work of the pool's threads."""

    @property
    def lane(self) -> Lane:
        """The lane that it belongs to."""
        ...


W = TypeVar("W", bound=Work)


class MaskPool(Generic[W]):
    """`compute` does pieces of work, calls `note` as they progress, and sets their lanes' costs; it
    must not raise. The threads start with the first piece of work and end with `close`."""

    def __init__(self, compute: Callable[[list[W]], None], budget_s: float) -> None:
        """`budget_s` is the time that a step waits for work; more of it makes a lane slow."""
        self._compute = compute
        self._budget_s = budget_s
        self._lock = threading.Lock()
        self._quick: deque[Lane] = deque()
        self._slow: deque[Lane] = deque()
        self._has_quick = threading.Condition(self._lock)
        self._has_slow = threading.Condition(self._lock)
        self._progress = threading.Condition(self._lock)
        self._awaited: set[W] = set()
        self._is_done: Callable[[W], bool] = lambda work: True
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def is_slow(self, lane: Lane) -> bool:
        """Whether the lane's next piece of work is not expected within a step's budget."""
        return lane.cost_s * max(1, len(lane.waiting)) > self._budget_s

    def submit(self, works: Iterable[W]) -> None:
        """Queue work; a lane's pieces are done in this order."""
        with self._lock:
            if not self._threads and not self._is_closed:
                self._start()
            lanes: dict[Lane, None] = {}
            for work in works:
                work.lane.waiting.append(work)
                lanes[work.lane] = None
            for lane in lanes:
                self._enqueue(lane)

    def note(self, work: W) -> None:
        """Wake `wait_for` after progress, so that it checks again."""
        with self._lock:
            if work in self._awaited and self._is_done(work):
                self._awaited.discard(work)
                if not self._awaited:
                    self._progress.notify_all()

    def wait_for(self, works: Iterable[W], is_done: Callable[[W], bool]) -> None:
        """Wait until all are done, but no longer than a step's budget. A lane that takes longer is
        slow from now on. Do not wait for slow lanes."""
        deadline = time.monotonic() + self._budget_s
        with self._lock:
            self._is_done = is_done
            self._awaited = {w for w in works if not is_done(w) and not self.is_slow(w.lane)}
            while self._awaited and (left := deadline - time.monotonic()) > 0:
                self._progress.wait(left)
            for work in self._awaited:
                work.lane.cost_s = float("inf")  # until its work is measured
            self._awaited = set()

    def close(self) -> None:
        """End the threads after their current work; queued work is dropped."""
        with self._lock:
            self._is_closed = True
            for condition in (self._has_quick, self._has_slow):
                condition.notify_all()
        for thread in self._threads:
            thread.join()

    # -- threads ------------------------------------------------------------------------------

    def _start(self) -> None:
        names = [f"masks-{number}" for number in range(_NUM_QUICK)]
        self._threads = [
            threading.Thread(target=self._serve_quick, name=name, daemon=True) for name in names
        ]
        slow = threading.Thread(target=self._serve_slow, name="masks-slow", daemon=True)
        self._threads.append(slow)
        for thread in self._threads:
            thread.start()

    def _serve_quick(self) -> None:
        while True:
            with self._lock:
                while not self._quick and not self._is_closed:
                    self._has_quick.wait()
                if self._is_closed:
                    return
                lanes = self._quick_lanes()
                works = [work for lane in lanes for work in self._take(lane, len(lane.waiting))]
            if lanes:
                self._do(works, lanes)

    def _serve_slow(self) -> None:
        _lower_priority()
        while True:
            with self._lock:
                while not self._slow and not self._is_closed:
                    self._has_slow.wait()
                if self._is_closed:
                    return
                lane = self._slow.popleft()
                works = self._take(lane, 1)
            self._do(works, [lane])

    def _do(self, works: list[W], lanes: list[Lane]) -> None:
        self._compute(works)
        with self._lock:
            for lane in lanes:
                lane.is_taken = False
                if lane.waiting:
                    self._enqueue(lane)

    def _quick_lanes(self) -> list[Lane]:
        """Empty the queue of quick lanes, the quickest first. A lane that has become slow because
        of much new work goes to the other queue."""
        lanes = sorted(self._quick, key=lambda lane: lane.cost_s)
        self._quick.clear()
        for lane in lanes:
            if self.is_slow(lane):
                lane.is_queued = False
                self._enqueue(lane)
        return [lane for lane in lanes if not self.is_slow(lane)]

    @staticmethod
    def _take(lane: Lane, count: int) -> list[W]:
        lane.is_queued, lane.is_taken = False, True
        return [lane.waiting.popleft() for _ in range(count)]

    def _enqueue(self, lane: Lane) -> None:
        if lane.is_queued or lane.is_taken:
            return
        lane.is_queued = True
        if self.is_slow(lane):
            self._slow.append(lane)
            self._has_slow.notify()
        else:
            self._quick.append(lane)
            self._has_quick.notify()


def _lower_priority() -> None:
    """Lower the priority of this thread and of those that it starts."""
    if sys.platform == "linux":  # elsewhere niceness belongs to processes
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _SLOW_NICE)
