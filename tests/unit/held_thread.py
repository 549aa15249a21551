"""A thread of a tier whose jobs run when a test says so."""

from __future__ import annotations

from collections import deque

from kv_transfer.tiers.io_thread import Job


class HeldThread:
    """See `IoThread`. Jobs run when a caller asks whether they have ended. If the thread `is_held`,
    they run only in `run`."""

    def __init__(self) -> None:
        self.is_held = False
        self.waiting: deque[Job] = deque()
        self._over: list[tuple[Job, Exception | None]] = []

    def submit(self, job: Job, is_urgent: bool) -> None:
        self.waiting.append(job)

    def run(self, count: int = 1 << 30) -> None:
        for _ in range(min(count, len(self.waiting))):
            job = self.waiting.popleft()
            try:
                job.run()
            except Exception as error:  # noqa: BLE001 - as the real one
                self._over.append((job, error))
            else:
                self._over.append((job, None))

    def finish(self) -> None:
        if not self.is_held:
            self.run()
        over, self._over = self._over, []
        for job, error in over:
            job.over(error)

    def close(self) -> None:
        self.waiting.clear()
