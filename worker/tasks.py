"""The current attempts of a worker by key, and the keys of ended attempts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kv_transfer.handoff.key import ClosedHandoffs, HandoffKey
from process.sockets.control import Peer
from protocol.traces import ChunkSpan
from scheduling.sequence import Sequence

_REMEMBERED = 8192


@dataclass(eq=False)
class Task:
    """An attempt from its router's message until it ends here.

    Times are microseconds of the Unix epoch, 0 until the event has happened. `attempt` is the
    number under which the router knows the task; a Resume changes it, but not the handoff's key.
    `chunks` were computed here. A resumable task may outlive its router.
    """

    router: Peer
    sequence: Sequence
    received_us: int
    is_resumable: bool = False
    attempt: int = -1
    chunks: list[ChunkSpan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.attempt = self.sequence.attempt

    @property
    def asked(self) -> HandoffKey:
        """The attempt under which the router knows the task."""
        return HandoffKey(self.sequence.request_id, self.attempt)

    @property
    def key(self) -> HandoffKey:
        """The task's key, which is also the handoff's."""
        return HandoffKey(*self.sequence.key)

    @property
    def computed_tokens(self) -> int:
        """Tokens that were computed here in chunks."""
        return sum(each.num_tokens for each in self.chunks)

    def note_chunk(self, span: ChunkSpan, step: int) -> None:
        """Record a chunk that was computed here, in step number `step`."""
        self.chunks.append(span)


AnyTask = TypeVar("AnyTask", bound=Task)


class Tasks(Generic[AnyTask]):
    """Tasks by the key of their handoff. May be changed during iteration."""

    def __init__(self) -> None:
        self._tasks: dict[HandoffKey, AnyTask] = {}
        self._ended = ClosedHandoffs(_REMEMBERED)

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[AnyTask]:
        return iter(list(self._tasks.values()))

    def add(self, task: AnyTask) -> None:
        """Add a task."""
        self._tasks[task.key] = task

    def remove(self, task: AnyTask) -> None:
        """Remove a task that has ended, and remember its key."""
        del self._tasks[task.key]
        self._ended.remember(task.key, "")

    def is_known(self, key: HandoffKey) -> bool:
        """Whether this attempt is here or is remembered as ended."""
        return key in self._tasks or self._ended.error_of(key) is not None

    def find(self, key: HandoffKey) -> AnyTask | None:
        """The task with this key, if it is here."""
        return self._tasks.get(key)

    def find_of(self, sequence: Sequence) -> AnyTask | None:
        """The task of this sequence, if it is here."""
        return self._tasks.get(HandoffKey(*sequence.key))

    def of(self, sequence: Sequence) -> AnyTask:
        """The task of this sequence; it must be here."""
        return self._tasks[HandoffKey(*sequence.key)]

    def of_request(self, request_id: str) -> list[AnyTask]:
        """All attempts at a request."""
        return [task for task in self._tasks.values() if task.sequence.request_id == request_id]

    def asked_by(self, router: Peer, asked: HandoffKey) -> AnyTask | None:
        """The task that this router knows as `asked`, if it belongs to this router."""
        found = (task for task in self._tasks.values() if task.asked == asked)
        return next((task for task in found if task.router == router), None)
