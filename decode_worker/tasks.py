"""The current attempts of a decode worker by key, and the keys of ended ones."""

from __future__ import annotations

from collections.abc import Iterator

from decode_worker.task import Task
from kv_transfer.handoff.key import ClosedHandoffs, HandoffKey
from process.sockets.control import Peer
from scheduling.sequence import Sequence

_REMEMBERED = 8192


class Tasks:
    """Tasks by the key of their handoff. May be changed during iteration."""

    def __init__(self) -> None:
        self._tasks: dict[HandoffKey, Task] = {}
        self._ended = ClosedHandoffs(_REMEMBERED)

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(list(self._tasks.values()))

    def add(self, task: Task) -> None:
        """Add a task."""
        self._tasks[task.key] = task

    def remove(self, task: Task) -> None:
        """Remove a task that has ended, and remember its key."""
        del self._tasks[task.key]
        self._ended.remember(task.key, "")

    def is_known(self, key: HandoffKey) -> bool:
        """Whether this attempt is here or is remembered as ended."""
        return key in self._tasks or self._ended.error_of(key) is not None

    def find(self, key: HandoffKey) -> Task | None:
        """The task with this key, if it is here."""
        return self._tasks.get(key)

    def of(self, sequence: Sequence) -> Task:
        """The task of this sequence; it must be here."""
        return self._tasks[HandoffKey(*sequence.key)]

    def of_request(self, request_id: str) -> list[Task]:
        """All attempts at a request."""
        return [task for task in self._tasks.values() if task.sequence.request_id == request_id]

    def asked_by(self, router: Peer, asked: HandoffKey) -> Task | None:
        """The task that this router knows as `asked`, if it belongs to this router."""
        found = (task for task in self._tasks.values() if task.asked == asked)
        return next((task for task in found if task.router == router), None)
