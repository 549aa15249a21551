"""Finding the decode worker of a stream that its client resumes. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.fleet.worker import Worker
from router.routing.placement import Candidate, Mode, Placement, Rule


@dataclass(eq=False)
class Searching:
    """The state of a generation whose decode worker is not known yet. All decode workers that the
    router knew when the search began are asked for the stream, each as soon as it is connected.

    `number` is the attempt number in the question. `waiting` are the workers that may have the
    stream; `asked` are those among them that were asked.
    """

    number: int
    waiting: set[Worker]
    asked: set[Worker] = field(default_factory=set)

    @property
    def unasked(self) -> set[Worker]:
        """The workers that were not connected until now."""
        return self.waiting - self.asked

    def is_answer(self, worker: Worker, number: int) -> bool:
        """Whether a worker's message with this attempt number answers the question."""
        return number == self.number and worker in self.asked

    def rule_out(self, worker: Worker) -> None:
        """Note that this worker does not have the stream."""
        self.waiting.discard(worker)
        self.asked.discard(worker)


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
