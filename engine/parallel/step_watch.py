"""Notices that a step on several cards does not end because a rank or its card hangs.

The host of a card does not wait for the card, so none of its calls fails in that case. A thread
looks at the oldest step that is under way.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from engine.fences import Fence


class StepWatch:
    """Calls `lost`, once and from another thread, when a step has been under way for `limit_s`."""

    def __init__(
        self,
        limit_s: float,
        lost: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_s = limit_s
        self._lost = lost
        self._clock = clock
        self._steps: deque[tuple[float, Fence]] = deque()
        self._is_closed = threading.Event()

    def start(self) -> None:
        """Start the thread, which ends with `close`."""
        threading.Thread(target=self._run, name="rank-steps", daemon=True).start()

    def note(self, fence: Fence) -> None:
        """A step is launched; `fence` is behind it."""
        self._steps.append((self._clock(), fence))

    def has_lost(self) -> bool:
        """Look at the steps under way. Report one that takes too long, or a card that has failed;
        whether there is either."""
        try:
            while self._steps and self._steps[0][1].is_done():
                self._steps.popleft()
        except RuntimeError as error:
            self._lost(f"a card has failed: {error}")
            return True
        if not self._steps or self._clock() - self._steps[0][0] < self._limit_s:
            return False
        self._lost(f"a step of all ranks has not ended within {self._limit_s:g} s")
        return True

    def close(self) -> None:
        """Report no more."""
        self._is_closed.set()

    def _run(self) -> None:
        while not self._is_closed.wait(min(1.0, self._limit_s / 4)):
            if self.has_lost():
                return
