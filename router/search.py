"""Asking a fleet's decode workers which of them keeps a stream that is resumed.

One question at a time for each generation, to every decode worker that is known, as soon as it is
connected. Knows neither what the answer is good for nor how long to wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from protocol.messages import Resume
from router.placement import Candidate, Mode, Placement
from router.worker import Worker


class Search:
    """`done` once one worker had the stream, or none can have it any more."""

    def __init__(self, question: Resume, workers: Iterable[Worker]) -> None:
        self.question = question
        self.done = asyncio.get_running_loop().create_future()
        self._waiting = set(workers)
        self._asked: set[Worker] = set()
        self.ask()
        self._check()

    def ask(self) -> None:
        """Ask those that could not be reached before."""
        for worker in self._waiting - self._asked:
            if worker.link.send(self.question):
                self._asked.add(worker)

    def rule_out(self, worker: Worker) -> None:
        """This one does not have it."""
        self._waiting.discard(worker)
        self._asked.discard(worker)
        self._check()

    def end(self) -> None:
        """It is found."""
        self._waiting.clear()
        self._check()

    def _check(self) -> None:
        if not self._waiting and not self.done.done():
            self.done.set_result(None)


def placement_of(worker: Worker) -> Placement:
    """Where a stream was found is where it goes on."""
    return Placement(
        mode=Mode.RESUME,
        decode=Candidate(worker.worker_id, 0, 0, 0, 0, 0),
        prefill=None,
        reason=f"resume: {worker.worker_id} kept the stream",
        decode_candidates=(),
        prefill_candidates=(),
        excluded=(),
    )
