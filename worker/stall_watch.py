"""Notices when a worker makes no progress although waiting requests could be admitted. Only reports
it.

`StallWatch` is pure: its owner passes in progress and waiting requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

from scheduling.scheduler import Scheduler
from worker.counters import Count, Counters
from worker.lifecycle import Lifecycle

log = logging.getLogger(__name__)


class StallWatch:
    """`is_stalled` is True from `bound_s` after the last progress until the next progress."""

    def __init__(self, bound_s: float) -> None:
        self.is_stalled = False
        self._bound_s = bound_s
        self._seen: Hashable = None
        self._since = float("inf")

    def update(self, now: float, progress: Hashable, waits: Callable[[], bool]) -> bool:
        """Returns whether `is_stalled` has changed. `progress` differs after each step, grant or
        release. `waits` returns whether requests could be admitted if there were room; it is called
        only without progress."""
        if progress != self._seen or not waits():
            self._seen, self._since = progress, now
        was_stalled, self.is_stalled = self.is_stalled, now - self._since >= self._bound_s
        return self.is_stalled != was_stalled


class StallAlarm:
    """Logs, counts and announces the stalls of a worker, and their ends."""

    def __init__(
        self, scheduler: Scheduler, counters: Counters, lifecycle: Lifecycle, alarm_s: float
    ) -> None:
        self._scheduler = scheduler
        self._counters = counters
        self._lifecycle = lifecycle
        self._alarm_s = alarm_s
        self._watch = StallWatch(alarm_s)

    def update(
        self,
        now: float,
        holders: Callable[[], list[str]],
        waits_for_others: Callable[[], bool] = lambda: False,
    ) -> None:
        """Call it every turn. `holders` returns the holders of the worker's blocks, one line each.
        While `waits_for_others` (which are alive and busy), the worker is not stalled."""
        blocks = self._scheduler.blocks
        progress = (self._counters[Count.STEPS], blocks.num_moves)

        def waits() -> bool:
            return self._scheduler.roster.num_held_up > 0 and not waits_for_others()

        if not self._watch.update(now, progress, waits):
            return
        if self._watch.is_stalled:
            self._counters.add(Count.STALLS)
            log.error(
                "%d requests wait, and for %g s nothing was computed, granted or released; %d of "
                "%d blocks are free; held are:%s",
                self._scheduler.roster.num_held_up,
                self._alarm_s,
                blocks.num_free,
                blocks.num_blocks,
                "".join(f"\n  {line}" for line in holders()) or " none",
            )
        self._lifecycle.set_stalled(self._watch.is_stalled)
