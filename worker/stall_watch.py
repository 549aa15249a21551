"""Notices that a worker does nothing although requests wait that it could admit. An alarm, no cure.

`StallWatch` is pure: its owner says what has happened so far and whether requests wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

from scheduling.scheduler import Scheduler
from worker.counters import Count, Counters
from worker.lifecycle import Lifecycle

log = logging.getLogger(__name__)


class StallWatch:
    """`is_stalled` from `bound_s` after the last progress until the next."""

    def __init__(self, bound_s: float) -> None:
        self.is_stalled = False
        self._bound_s = bound_s
        self._seen: Hashable = None
        self._since = float("inf")

    def look(self, now: float, progress: Hashable, waits: Callable[[], bool]) -> bool:
        """Whether `is_stalled` has changed. `progress` differs after each step, grant or release;
        `waits` says whether requests could be admitted if there were room, and is asked only if
        nothing has happened."""
        if progress != self._seen or not waits():
            self._seen, self._since = progress, now
        was_stalled, self.is_stalled = self.is_stalled, now - self._since >= self._bound_s
        return self.is_stalled != was_stalled


class StallAlarm:
    """Raises the alarm that a worker stands still, and ends it."""

    def __init__(
        self, scheduler: Scheduler, counters: Counters, lifecycle: Lifecycle, alarm_s: float
    ) -> None:
        self._scheduler = scheduler
        self._counters = counters
        self._lifecycle = lifecycle
        self._alarm_s = alarm_s
        self._watch = StallWatch(alarm_s)

    def look(
        self,
        now: float,
        holders: Callable[[], list[str]],
        waits_for_others: Callable[[], bool] = lambda: False,
    ) -> None:
        """Called every turn. `holders` says what holds the worker's blocks, one line each. While it
        `waits_for_others` that live and are busy, it does not stand still."""
        blocks = self._scheduler.blocks
        progress = (self._counters[Count.STEPS], blocks.num_moves)

        def waits() -> bool:
            return self._scheduler.num_held_up > 0 and not waits_for_others()

        if not self._watch.look(now, progress, waits):
            return
        if self._watch.is_stalled:
            self._counters.add(Count.STALLS)
            log.error(
                "%d requests wait, and for %g s nothing was computed, granted or released; %d of "
                "%d blocks are free; held are:%s",
                self._scheduler.num_held_up,
                self._alarm_s,
                blocks.num_free,
                blocks.num_blocks,
                "".join(f"\n  {line}" for line in holders()) or " none",
            )
        self._lifecycle.set_stalled(self._watch.is_stalled)
