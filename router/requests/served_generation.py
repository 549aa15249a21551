"""A generation with its client and its history."""

from __future__ import annotations

import asyncio
from collections import deque

from router.requests.interface import DeltaSink, GenerationRequest, TokenDelta
from router.requests.machine.attempt import Attempt
from router.requests.machine.generation import Generation
from router.requests.machine.retries import Retries
from router.requests.machine.states import Failure
from router.requests.trace import AttemptTrace, RequestTrace


class ServedGeneration(Generation):
    """A generation that a dispatcher serves. Its task sleeps until an event wakes it up.

    Deltas go directly to the sink. While the sink is full they wait in `backlog`, which the task
    gives to the sink before it looks at the state.
    """

    def __init__(
        self,
        request: GenerationRequest,
        deadline: float,
        retries: Retries,
        sink: DeltaSink,
        trace: RequestTrace,
    ) -> None:
        super().__init__(request, deadline, retries)
        self.sink = sink
        self.trace = trace
        self.backlog: deque[TokenDelta] = deque()
        self._sleeper: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Let the task look at the backlog and the state."""
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)

    async def sleep(self) -> None:
        """Wait until `wake` is called."""
        self._sleeper = asyncio.get_running_loop().create_future()
        await self._sleeper

    def note_attempt(self, attempt: Attempt, now_us: int) -> None:
        """Begin the history of an attempt that has just begun."""
        source = "" if attempt.prefill is None else attempt.prefill.worker_id
        trace = AttemptTrace(attempt.number, attempt.placement, now_us, source)
        trace.block_size = attempt.block_size
        self.trace.attempts.append(trace)

    def note_failure(self, attempt: Attempt, failure: Failure, now_us: int) -> None:
        """End the history of an attempt that failed."""
        trace = self.trace.find(attempt.number)
        assert trace is not None, "every attempt is noted in the trace"
        trace.failed, trace.failed_us = failure.reason, now_us
        trace.reported_computed += failure.computed_tokens
