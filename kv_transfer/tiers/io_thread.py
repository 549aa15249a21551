"""A thread that reads and writes a tier, so that the thread that steps does neither.

Jobs run one after another, the urgent ones first. Their owner learns of their end when it calls
`finish`, in its own thread, so that only the jobs' `run` needs to think of two threads.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Job:
    """`run` is called by the thread; then `finish` calls `over` with the error, if there was one.
    Neither is called for jobs that are left when the thread is closed."""

    run: Callable[[], None]
    over: Callable[[Exception | None], None]


class IoThread:
    """Runs jobs. `wake` is called by the thread when one is over; it must neither block nor
    raise. `enter` is called by the thread once, before its first job; if it raises, no job runs,
    and each is over with that error."""

    def __init__(
        self, name: str, wake: Callable[[], None], enter: Callable[[], None] = lambda: None
    ) -> None:
        self._wake = wake
        self._enter = enter
        self._ready = threading.Condition()  # guards the next four attributes
        self._urgent: deque[Job] = deque()
        self._others: deque[Job] = deque()
        self._over: list[tuple[Job, Exception | None]] = []
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job, is_urgent: bool) -> None:
        """Run a job when its turn comes."""
        with self._ready:
            (self._urgent if is_urgent else self._others).append(job)
            self._ready.notify()

    def finish(self) -> None:
        """Report the jobs that are over since the last call."""
        if not self._over:  # a job that ends now is reported by the next call
            return
        with self._ready:
            over, self._over = self._over, []
        for job, error in over:
            job.over(error)

    def close(self) -> None:
        """End the thread after the job that it runs now."""
        with self._ready:
            self._is_closed = True
            self._ready.notify()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("%s did not end within %g s", self._thread.name, CLOSE_TIMEOUT_S)

    # -- in the thread -------------------------------------------------------------------------

    def _work(self) -> None:
        barred = _error_of(self._enter)
        while (job := self._next()) is not None:
            error = barred or _error_of(job.run)
            with self._ready:
                self._over.append((job, error))
            self._wake()

    def _next(self) -> Job | None:
        with self._ready:
            self._ready.wait_for(lambda: self._is_closed or self._urgent or self._others)
            if self._is_closed:
                return None
            return (self._urgent or self._others).popleft()


def _error_of(call: Callable[[], None]) -> Exception | None:
    """What a call raises; None if it does not."""
    try:
        call()
    except Exception as raised:  # noqa: BLE001 - the top of a task: its owner gets it
        return raised
    return None
