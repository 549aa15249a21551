"""Asks a fleet's decode workers which of them keeps a stream that is being resumed.

Each generation has at most one open question, which goes to every known decode worker as soon as
that worker is connected. Does not know how the answer is used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from protocol.messages import NotKept, Resume, Resumed
from router.fleet.worker import Worker
from router.routing.view import Candidate, Mode, Placement, Rule


class Search:
    """One search. `done` resolves when a worker has the stream, or when no worker can have it."""

    def __init__(self, question: Resume, workers: Iterable[Worker]) -> None:
        self.question = question
        self.done = asyncio.get_running_loop().create_future()
        self._waiting = set(workers)
        self._asked: set[Worker] = set()
        self.ask()
        self._check()

    def ask(self) -> None:
        """Ask the workers that could not be reached before."""
        for worker in self._waiting - self._asked:
            if worker.link.send(self.question):
                self._asked.add(worker)

    def has_asked(self, worker: Worker) -> bool:
        """Whether this worker was asked and has not answered."""
        return worker in self._asked

    def rule_out(self, worker: Worker) -> None:
        """Note that this worker does not have the stream."""
        self._waiting.discard(worker)
        self._asked.discard(worker)
        self._check()

    def end(self) -> None:
        """Note that the stream was found."""
        self._waiting.clear()
        self._check()

    def _check(self) -> None:
        if not self._waiting and not self.done.done():
            self.done.set_result(None)


class Searches:
    """All open searches; at most one, the latest, for each generation."""

    def __init__(self, wait_s: float) -> None:
        """`wait_s` is the longest time of a search."""
        self._wait_s = wait_s
        self._searches: dict[str, Search] = {}

    @property
    def num_open(self) -> int:
        """Searches that have not ended."""
        return len(self._searches)

    async def run(self, question: Resume, workers: Iterable[Worker]) -> None:
        """Ask, and wait until the stream is found, no worker can have it, or the time is up."""
        name = question.request_id
        search = self._searches[name] = Search(question, workers)
        try:
            await asyncio.wait([search.done], timeout=self._wait_s)
        finally:
            if self._searches.get(name) is search:
                del self._searches[name]

    def try_find(self, worker: Worker, answer: Resumed | NotKept) -> Search | None:
        """The search that a worker's answer belongs to; None if that search is over or did not ask
        this worker."""
        search = self._searches.get(answer.request_id)
        is_ours = (
            search is not None
            and search.question.attempt == answer.attempt
            and search.has_asked(worker)
        )
        return search if is_ours else None

    def not_kept(self, worker: Worker, answer: NotKept) -> None:
        """Note that this worker does not have the stream."""
        search = self.try_find(worker, answer)
        if search is not None:
            search.rule_out(worker)

    def ask(self) -> None:
        """Ask the workers that could not be reached before."""
        for search in self._searches.values():
            search.ask()

    def rule_out(self, worker: Worker) -> None:
        """Note that this worker is lost, with any stream that it kept."""
        for search in self._searches.values():
            search.rule_out(worker)


def placement_of(worker: Worker) -> Placement:
    """A placement on the worker where a stream was found."""
    return Placement(
        mode=Mode.RESUME,
        decode=Candidate(worker.worker_id, 0, 0, 0),
        prefill=None,
        rule=Rule.KEPT,
        reason=f"resume: {worker.worker_id} kept the stream",
        decode_candidates=(),
        prefill_candidates=(),
        excluded=(),
    )
