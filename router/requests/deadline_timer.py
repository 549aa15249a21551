"""Deadlines of many tasks on one timer.

The standard library's `asyncio.timeout` creates and cancels a timer for each use, which is most
of its cost. Here only the next deadline has a timer; a task that ends earlier just increments a
counter.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from itertools import count
from types import TracebackType

MIN_ENDED = 64
"""The heap is rebuilt without ended deadlines once it holds at least this many of them."""


class Deadline:
    """A context that cancels the current task at its deadline and then raises TimeoutError, as
    `asyncio.timeout` does."""

    __slots__ = ("_cancelling", "_deadlines", "is_over", "task")

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._cancelling = 0
        self.is_over = False
        self.task: asyncio.Task[object] | None = None

    def __enter__(self) -> None:
        self.task = asyncio.current_task()
        assert self.task is not None, "only tasks have deadlines"
        self._cancelling = self.task.cancelling()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        task, self.task = self.task, None
        assert task is not None, "it was entered"
        if not self.is_over:
            self._deadlines.note_end()
        elif task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error


class Deadlines:
    """All deadlines of an event loop's tasks, by the clock `now`."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._waiting: list[tuple[float, int, Deadline]] = []
        self._numbers = count()
        self._num_ended = 0
        self._timer: asyncio.TimerHandle | None = None
        self._next = float("inf")

    def __len__(self) -> int:
        return len(self._waiting) - self._num_ended

    def until(self, deadline: float) -> Deadline:
        """Create a context, which the caller must enter at once."""
        made = Deadline(self)
        heapq.heappush(self._waiting, (deadline, next(self._numbers), made))
        if deadline < self._next:
            self._set_timer(deadline)
        return made

    def note_end(self) -> None:
        """Note that a context was left before its deadline."""
        self._num_ended += 1
        if self._num_ended >= MIN_ENDED and 2 * self._num_ended > len(self._waiting):
            self._waiting = [each for each in self._waiting if each[2].task is not None]
            heapq.heapify(self._waiting)
            self._num_ended = 0

    def _set_timer(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._next = deadline
        wait_s = max(0.0, deadline - self._now())
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._on_timer)

    def _on_timer(self) -> None:
        """Cancel the tasks whose deadline has passed and set the timer for the next one."""
        self._timer = None
        self._next = float("inf")
        now = self._now()
        while self._waiting:
            deadline, _, first = self._waiting[0]
            if first.task is not None and deadline > now:
                self._set_timer(deadline)
                return
            heapq.heappop(self._waiting)
            if first.task is None:
                self._num_ended -= 1
            else:
                first.is_over = True
                first.task.cancel()
