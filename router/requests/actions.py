"""Carries out the actions of generations: sends messages and tokens, starts timers, counts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from protocol.messages import FirstToken, HandedOver, PrefillDone, Resumed, SequenceTokens
from protocol.traces import DecodeTrace, PrefillTrace
from router.fleet.worker import Worker
from router.metrics import FleetMetrics
from router.requests.interface import TokenDelta
from router.requests.machine import states
from router.requests.machine.attempt import Attempt, Send
from router.requests.served_generation import ServedGeneration
from router.requests.trace_store import TraceStore
from router.settings import RoutingSettings

TracedMessage = FirstToken | PrefillDone | SequenceTokens | Resumed | HandedOver


class ActionRunner:
    """Carries out actions for a dispatcher; has no state of its own."""

    def __init__(
        self, settings: RoutingSettings, traces: TraceStore, metrics: FleetMetrics
    ) -> None:
        self._first_token_wait_s = settings.first_token_wait_s
        self._max_unread = settings.max_unread_deltas
        self._traces = traces
        self._metrics = metrics

    def carry_out(
        self, generation: ServedGeneration, actions: Sequence[states.Action], now_us: int = 0
    ) -> None:
        """Carry out the actions that an event at `now_us` caused, in their order, and wake the
        generation's task."""
        for action in actions:
            match action:
                case TokenDelta():
                    self.deliver(generation, action, now_us)
                case Send(worker, message):
                    worker.link.send(message)
                case states.AttemptEnded(attempt, failure, kind):
                    generation.note_failure(attempt, failure, self._traces.wall_us())
                    if kind:
                        self._metrics.failures.add(kind)
                case states.Probe(worker):
                    generation.failures.on_probe(worker, worker.link.ping())
                case states.AwaitFirstToken(attempt):
                    loop, wait_s = asyncio.get_running_loop(), self._first_token_wait_s
                    loop.call_later(wait_s, self._on_overdue, generation, attempt)
                case states.CountStale():
                    self._metrics.stale.inc()
        if not isinstance(generation.state, Attempt):
            generation.wake()

    def deliver(self, generation: ServedGeneration, delta: TokenDelta, now_us: int) -> None:
        """Pass a delta that came at `now_us` to the client, after the deltas that wait. The time of
        the first token is that of its delivery."""
        if type(generation.state) is states.Over:
            return  # the client wanted no delta after the one before
        trace, sink = generation.trace, generation.sink
        is_first = not trace.first_token_received_us
        if is_first:
            trace.first_token_received_us = trace.first_token_us = now_us
            trace.first_token_attempt = trace.attempts[-1]
            trace.num_cached_tokens = generation.cached_tokens
        trace.last_token_us = now_us  # the client's last event may carry these times
        trace.num_output_tokens = len(generation.stream.token_ids)
        if generation.backlog or sink.is_full:
            self._queue(generation, delta)
        elif not sink.take(delta) or delta.finish is not None:
            self._end(generation, delta)
        if is_first:
            trace.first_token_us = trace.last_token_us = self._traces.wall_us()

    async def catch_up(self, generation: ServedGeneration) -> None:
        """Wait until the sink has room, and pass it the oldest waiting delta."""
        while generation.sink.is_full:
            await generation.sink.wait_room()
        delta = generation.backlog.popleft()
        if not generation.sink.take(delta) or delta.finish is not None:
            self._end(generation, delta)

    def attach(
        self, worker: Worker, message: TracedMessage, trace: PrefillTrace | DecodeTrace
    ) -> None:
        """Keep the trace in a message, unless it is another worker's."""
        if trace.worker_id != worker.worker_id:
            return
        name, number, clock = message.request_id, message.attempt, worker.link.clock
        if isinstance(trace, DecodeTrace):
            self._traces.attach_decode(name, number, trace, clock)
        else:
            is_final = isinstance(message, PrefillDone)
            self._traces.attach_prefill(name, number, trace, is_final, clock)

    def _on_overdue(self, generation: ServedGeneration, attempt: Attempt) -> None:
        self.carry_out(generation, generation.on_overdue(attempt))

    def _queue(self, generation: ServedGeneration, delta: TokenDelta) -> None:
        """Keep a delta until the sink has room; end the generation if too many wait."""
        generation.backlog.append(delta)
        generation.wake()
        if len(generation.backlog) > self._max_unread:
            self.carry_out(generation, generation.on_unread())

    def _end(self, generation: ServedGeneration, last: TokenDelta) -> None:
        """End the generation: the client has its last token, or wants no more tokens."""
        generation.backlog.clear()
        outcome = "closed" if last.finish is None else "finished"
        self.carry_out(generation, generation.end(outcome))
