"""Streams that outlive their router: kept until another router resumes them or a grace time ends.

A running stream goes on without a router (as an orphan). If a router reconnects, it had only lost
its connection and has moved the stream elsewhere, so the orphan ends. The tokens of a finished
stream are kept even while its router lives, because the router may die before its client has read
them. A stream belongs to the router that asked last: its attempt number fences all earlier routers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from decode_worker.task import DecodeTask
from process.sockets.control import Peer
from protocol.messages import NotKept, Resume, Resumed
from protocol.traces import DecodeTrace
from worker.counters import Count
from worker.host import WorkerHost

MAX_KEPT_TOKENS = 1_000_000
"""The most tokens of all finished streams together, including entries of their
log-probabilities."""


@dataclass(frozen=True)
class _Kept:
    answer: Resumed
    until: float
    size: int


class Resumption:
    """The streams that may be resumed on one worker; belongs to the loop's thread."""

    def __init__(self, host: WorkerHost, grace_s: float) -> None:
        self._host = host
        self._clock = host.clock
        self._counters = host.counters
        self._grace_s = grace_s
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # by request, oldest first
        self._size = 0

    def try_orphan(self, task: DecodeTask) -> bool:
        """Let a task go on without its router, which is gone; False if it may not."""
        if self._grace_s <= 0 or not task.is_resumable:
            return False
        task.orphaned_at = self._clock.now()
        return True

    def keep(self, task: DecodeTask, trace: DecodeTrace) -> None:
        """Keep the tokens of a finished task, if it is resumable."""
        if self._grace_s <= 0 or not task.is_resumable:
            return
        answer = task.resumed(task.attempt, trace)
        tops = sum(1 + len(each.top) for each in answer.logprobs or ())
        size = len(answer.token_ids) + tops
        self._drop(task.sequence.request_id)
        self._kept[task.sequence.request_id] = _Kept(
            answer, self._clock.now() + self._grace_s, size
        )
        self._size += size
        while self._size > MAX_KEPT_TOKENS:
            self._drop(next(iter(self._kept)))

    def overdue(self, tasks: Iterable[DecodeTask]) -> list[DecodeTask]:
        """Orphans that no router resumed in time, or whose router is back and has them elsewhere.
        Also drops finished streams whose time is over. A draining worker keeps no orphans."""
        now = self._clock.now()
        while self._kept and next(iter(self._kept.values())).until <= now:
            self._drop(next(iter(self._kept)))
        since = now if self._host.lifecycle.is_draining else now - self._grace_s
        here = {peer.name for peer in self._host.server.peers}
        overdue = [
            task
            for task in tasks
            if task.orphaned_at is not None
            and (task.orphaned_at <= since or task.router.name in here)
        ]
        self._counters.add(Count.STREAMS_ABANDONED, len(overdue))
        return overdue

    def answer(self, router: Peer, message: Resume, task: DecodeTask | None) -> None:
        """Answer a router that asks for a stream; `task` is the running attempt here, if any."""
        kept = self._kept.get(message.request_id)
        if task is not None and task.is_resumable and message.attempt >= task.attempt:
            self._move(router, message, task)
        elif task is None and kept is not None:
            self._counters.add(Count.STREAMS_RESUMED)
            self._host.send(router, _renamed(kept.answer, message.attempt))
        else:
            request_id, attempt = message.request_id, message.attempt
            self._host.send(router, NotKept(request_id=request_id, attempt=attempt))

    def clear(self) -> None:
        """Forget all finished streams, because this worker becomes a new incarnation."""
        self._kept.clear()
        self._size = 0

    def _move(self, router: Peer, message: Resume, task: DecodeTask) -> None:
        if task.orphaned_at is None:
            reason = "the stream was resumed over another connection"
            trace_id = task.sequence.trace_id
            failure = self._host.failure(task.asked, reason, retryable=False, trace_id=trace_id)
            self._host.send(task.router, failure)
        task.router, task.attempt, task.orphaned_at = router, message.attempt, None
        self._counters.add(Count.STREAMS_RESUMED)
        self._host.send(router, task.resumed(message.attempt, None))

    def _drop(self, request_id: str) -> None:
        kept = self._kept.pop(request_id, None)
        if kept is not None:
            self._size -= kept.size


def _renamed(answer: Resumed, attempt: int) -> Resumed:
    return Resumed(
        request_id=answer.request_id,
        attempt=attempt,
        token_ids=answer.token_ids,
        logprobs=answer.logprobs,
        finish=answer.finish,
        cached_tokens=answer.cached_tokens,
        trace=answer.trace,
    )
