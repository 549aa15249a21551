"""The life of a generation: placed, started on its workers, followed to its last token.

Owns every running generation. Starts both legs at once, retries a failed attempt on other workers
from the token where it broke off, and aborts abandoned requests. Every wait ends by the request's
deadline. Knows no HTTP and no sockets. Invariant: however `generate` ends, no state of the request
is left here, and no worker computes for it in vain.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from protocol.control_message import ControlMessage
from protocol.errors import (
    DeadlineExceeded,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    RequestError,
    ServiceError,
    UnusableConstraint,
)
from protocol.messages import (
    Abort,
    AttemptFailed,
    FinishReason,
    FirstToken,
    HandedOver,
    NotKept,
    PrefillDone,
    Resume,
    Resumed,
    Role,
    SequenceTokens,
    StepTokens,
)
from protocol.traces import DecodeTrace
from router.fleet.fleet import Fleet
from router.fleet.worker import Loss, Worker
from router.metrics import FleetMetrics
from router.requests.attempt import Attempt
from router.requests.attempt_course import AttemptCourse
from router.requests.deadlines import Deadlines
from router.requests.experience import Experience
from router.requests.generation import End, Failure, Generation
from router.requests.handover import orders
from router.requests.interface import DeltaSink, GenerationRequest, TokenDelta
from router.requests.labels import error_label
from router.requests.launch import Launcher, PlacedListener, legs
from router.requests.loop_queues import Turnstile
from router.requests.resumption import Searches, placement_of
from router.requests.retries import Retries
from router.requests.token_stream import TokenPiece
from router.requests.trace import TraceStore
from router.routing.view import Targets
from router.settings import RoutingSettings


class Dispatcher:
    """Implements `router.requests.interface.Generator` over a fleet of workers."""

    def __init__(
        self,
        settings: RoutingSettings,
        fleet: Fleet,
        traces: TraceStore,
        metrics: FleetMetrics,
        rng: random.Random,
        on_placed: PlacedListener | None = None,
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._traces = traces
        self._metrics = metrics
        experience = Experience(traces, fleet.view().pairs)
        self._launcher = Launcher(settings, fleet, rng, experience, on_placed)
        self._course = AttemptCourse(settings, traces, metrics)
        self._retries = Retries(settings, rng)
        self._searches = Searches(settings.resume_wait_s)
        self._deadlines = Deadlines()
        self._long_launches = Turnstile()
        self._generations: dict[str, Generation] = {}
        self._is_stopping = False
        metrics.inflight.set_function(lambda: self.inflight)
        self.on_refused: Callable[[str, str], None] = lambda request_id, reason: None
        """Called with each request that is not admitted, and the reason."""
        self.on_end: Callable[[Generation], None] = lambda generation: None
        """Called with each generation that has ended, unless a later life of it goes on."""

    def use_targets(self, targets: Callable[[], Targets]) -> None:
        """Place requests that have no targets of their own by these."""
        self._launcher.targets = targets

    @property
    def inflight(self) -> int:
        """Generations that have not ended."""
        return len(self._generations)

    async def generate(self, request: GenerationRequest, sink: DeltaSink) -> list[int]:
        """See `Generator.generate`."""
        try:
            generation = self._admit(request, sink)
        except (RequestError, ServiceError) as error:
            self._metrics.refusals.add(error_label(error))
            self.on_refused(request.request_id, str(error))
            raise
        try:
            with self._deadlines.until(generation.deadline):
                await self._follow(generation)
            return generation.stream.token_ids
        except TimeoutError:
            generation.outcome = "failed"
            raise DeadlineExceeded(
                f"request {request.request_id} was not finished within its deadline; "
                f"attempts: {generation.num_attempts}"
            ) from None
        except (RequestError, ServiceError) as error:
            generation.outcome = "failed"
            if not generation.trace.attempts:
                self._metrics.refusals.add(error_label(error))
            raise
        finally:
            self._end(generation)

    def stop(self) -> None:
        """End every generation with an error and start no new one."""
        self._is_stopping = True
        for generation in self._generations.values():
            generation.events.put(Failure("the router stops", retryable=False))

    # -- the steps of a generation, in order ------------------------------------------------

    def _admit(self, request: GenerationRequest, sink: DeltaSink) -> Generation:
        """Open a generation, or raise the reason why it cannot run."""
        if request.request_id in self._generations and not request.life:
            raise InvalidRequest(f"request id {request.request_id} is in use")
        if self._is_stopping:
            raise Overloaded("the router stops")
        if self.inflight >= self._settings.max_inflight:
            raise Overloaded(f"{self.inflight} generations are running, as many as may")
        self._launcher.check_length(request)
        timeout_s = min(request.deadline_ms / 1000, self._settings.request_timeout_s)
        former = self._generations.get(request.request_id)
        if former is not None:
            self._end_life(former)
        trace = self._traces.begin(request.request_id, len(request.token_ids))
        generation = Generation(request, sink, time.monotonic() + timeout_s, trace)
        self._generations[request.request_id] = generation
        return generation

    async def _follow(self, generation: Generation) -> None:
        """Follow a generation to its end, over as many attempts as it needs and may have."""
        if generation.request.life:
            await self._search(generation)
        if self._launcher.is_long(generation):
            await self._launcher.prepare(generation)
        while True:
            if generation.is_idle and self._launcher.is_long(generation):
                await self._long_launches.passed()
            if generation.is_idle:
                self._launch(generation)
            event = await generation.events.get()
            if isinstance(event, End):
                return
            if isinstance(event, TokenDelta):
                await generation.catch_up(event)
            else:
                await self._recover(generation, event)

    async def _search(self, generation: Generation) -> None:
        """Find the worker that keeps the stream, if any; `_on_resumed` continues there."""
        generation.num_attempts += 1
        name = generation.request.request_id
        question = Resume(request_id=name, attempt=generation.attempt_number)
        await self._searches.run(question, self._fleet.known(Role.DECODE))

    def _launch(self, generation: Generation, source: Worker | None = None) -> None:
        """Place the next attempt and start both of its legs at once.

        `source` is the decode worker that hands the request over; then there is only one leg.
        """
        generation.num_attempts += 1
        try:
            attempt = self._launcher.open(generation, source, self._generations.values())
        except (Overloaded, PromptTooLong) as error:
            if generation.num_attempts == 1:
                raise
            is_overload = isinstance(error, Overloaded)
            generation.events.put(Failure(str(error), is_overload, lacks_room=is_overload))
            return
        generation.begin(attempt, self._traces.wall_us())
        self._metrics.attempts.add(attempt.placement.mode)
        self._metrics.decisions.add(attempt.placement.rule)
        if generation.num_attempts > 1 and source is None:
            self._metrics.retries.inc()
        for worker, message in legs(generation, attempt):
            if not worker.link.send(message):
                self._course.fail(
                    generation, worker, Failure(f"{worker.worker_id} cannot be reached")
                )
                return
            attempt.sent(worker)

    async def _recover(self, generation: Generation, failure: Failure) -> None:
        """Wait until another attempt may start. Raises GenerationFailed if none may, and Overloaded
        if the reason is lack of room."""
        name = generation.request.request_id
        if failure.code:
            raise UnusableConstraint(f"request {name} failed: {failure.reason}", failure.code)
        if not failure.retryable:
            raise GenerationFailed(f"request {name} failed: {failure.reason}")
        if len(generation.stream.token_ids) >= generation.request.sampling.max_tokens:
            generation.deliver(TokenDelta([], finish=FinishReason.LENGTH))
            return
        failures = generation.failures
        await asyncio.sleep(
            self._retries.pause_s(
                name, failures, generation.num_attempts, failure.reason, failure.lacks_room
            )
        )
        keeper = self._fleet.worker(failures.prefer_decode or "")
        await failures.wait_for_pong(keeper, self._settings.silence_s / 4)
        try:
            async with asyncio.timeout(self._settings.recovery_wait_s):
                await self._fleet.wait_for_decode(generation.needed_context)
        except TimeoutError:
            raise GenerationFailed(
                f"request {name} failed: {failure.reason}; no decode worker came back within "
                f"{self._settings.recovery_wait_s:g} s"
            ) from None

    def _end(self, generation: Generation) -> None:
        """Free all state of a generation; abort it on its workers if it was abandoned."""
        name, outcome = generation.request.request_id, generation.outcome
        attempt = generation.drop_attempt()
        is_kept = self._is_stopping and generation.request.is_resumable
        if attempt is not None and not is_kept:
            attempt.abort(name, outcome)
        is_over = self._generations.get(name) is generation
        if is_over:
            del self._generations[name]
        self._traces.end(generation.trace, outcome)
        self._metrics.outcomes.add(outcome)
        if is_over:
            self.on_end(generation)
        if generation.stream.duplicates:
            self._metrics.duplicates.inc(generation.stream.duplicates)

    def _end_life(self, generation: Generation) -> None:
        """End a generation whose client continues over another connection, even if the former
        connection is still open. The attempt keeps running on its worker."""
        generation.drop_attempt()
        generation.events.put(Failure("the stream was resumed elsewhere", retryable=False))

    # -- messages from workers --------------------------------------------------------------

    def on_message(self, worker: Worker, message: ControlMessage) -> None:
        """See `FleetListener`."""
        if isinstance(message, StepTokens):
            now_us = self._traces.wall_us()
            for sequence in message.sequences:
                self._on_sequence(worker, sequence, now_us)
        elif isinstance(message, FirstToken):
            self._on_first_token(worker, message)
        elif isinstance(message, PrefillDone):
            self._on_prefill_done(worker, message)
        elif isinstance(message, HandedOver):
            self._on_handed_over(worker, message)
        elif isinstance(message, Resumed):
            self._on_resumed(worker, message)
        elif isinstance(message, NotKept):
            self._searches.not_kept(worker, message)
        elif isinstance(message, AttemptFailed):
            generation = self._current(worker, message.request_id, message.attempt)
            if generation is not None:
                reason = f"{worker.worker_id}: {message.reason}"
                failure = Failure(reason, message.retryable, message.lacks_room, message.code)
                generation.trace.attempts[-1].reported_computed += message.computed_tokens
                self._course.fail(generation, worker, failure)
        else:
            self._metrics.refused.add("unexpected")

    def on_fleet(self) -> None:
        """See `FleetListener`. Requests leave draining decode workers if another has room."""
        for order in orders(self._generations.values(), self._fleet.ready(Role.DECODE)):
            attempt = self._generations[order.request_id].attempt
            assert attempt is not None
            attempt.is_leaving = attempt.decode.link.send(order)
        self._searches.ask()

    def on_lost(self, worker: Worker, reason: str, loss: Loss) -> int:
        """See `FleetListener`: every attempt on the worker fails at once."""
        num_failed = 0
        self._searches.rule_out(worker)
        for generation in self._generations.values():
            if generation.attempt is not None and generation.attempt.involves(worker):
                self._course.fail(
                    generation, worker, Failure(f"{worker.worker_id}: {reason}"), loss
                )
                num_failed += 1
            elif loss is Loss.BROKEN:
                generation.failures.count_late_death(worker)
        return num_failed

    def _on_resumed(self, worker: Worker, message: Resumed) -> None:
        """Continue a stream on the worker that has it. Abort a stream that is no longer wanted."""
        search = self._searches.try_find(worker, message)
        generation = self._generations.get(message.request_id)
        if search is None or generation is None or generation.attempt is not None:
            self._metrics.stale.inc()
            worker.link.send(Abort(request_id=message.request_id, attempt=message.attempt))
            return
        placement = placement_of(worker)
        attempt = Attempt(message.attempt, 0, placement, worker, None, [], decode_runs=True)
        generation.begin(attempt, self._traces.wall_us())
        self._metrics.attempts.add(placement.mode)
        if message.trace is not None:
            self._attach_decode(worker, message, message.trace)
        generation.note_cached(message.cached_tokens)
        piece = TokenPiece(0, message.token_ids, message.logprobs, message.finish)
        self._course.take(generation, worker, piece, self._traces.wall_us())
        search.end()

    def _on_prefill_done(self, worker: Worker, message: PrefillDone) -> None:
        """All KV has arrived: the attempt no longer depends on the prefill worker."""
        self._attach_prefill(worker, message, is_final=True)
        generation = self._generations.get(message.request_id)
        attempt = generation.attempt if generation else None
        if attempt is None or attempt.number != message.attempt:
            return
        if worker is attempt.prefill:
            attempt.is_moved = True
            attempt.release_pair()

    def _on_handed_over(self, worker: Worker, message: HandedOver) -> None:
        """A draining worker ended its part of the request: start the next attempt elsewhere."""
        name = message.request_id
        self._attach_decode(worker, message, message.trace)
        generation = self._current(worker, name, message.attempt)
        if generation is None or message.next_attempt != generation.attempt_number + 1:
            worker.link.send(Abort(request_id=name, attempt=message.next_attempt))
            return
        attempt = generation.drop_attempt()
        assert attempt is not None
        if attempt.prefill is not None and attempt.involves(attempt.prefill):
            attempt.abort(name, "its decode worker drains", failed=worker)
        has_all = message.num_output == len(generation.stream.token_ids)
        self._launch(generation, worker if message.keeps_kv and has_all else None)
        if message.keeps_kv and not generation.takes_from(worker):
            worker.link.send(Abort(request_id=name, attempt=message.next_attempt))

    def _on_sequence(self, worker: Worker, sequence: SequenceTokens, now_us: int) -> None:
        if sequence.trace is not None:
            self._attach_decode(worker, sequence, sequence.trace)
        generation = self._current(worker, sequence.request_id, sequence.attempt)
        if generation is None:
            return
        if sequence.cached_tokens is not None:
            generation.note_cached(sequence.cached_tokens)
        self._course.take(generation, worker, sequence, now_us)

    def _on_first_token(self, worker: Worker, message: FirstToken) -> None:
        self._attach_prefill(worker, message, is_final=False)
        generation = self._current(worker, message.request_id, message.attempt)
        if generation is None:
            return
        generation.note_cached(message.trace.not_computed)
        logprobs = None if message.logprobs is None else [message.logprobs]
        ids, prompt_logprobs = [message.token_id], message.prompt_logprobs
        piece = TokenPiece(message.index, ids, logprobs, message.finish, prompt_logprobs)
        self._course.take(generation, worker, piece, self._traces.wall_us())

    def _attach_prefill(
        self, worker: Worker, message: FirstToken | PrefillDone, is_final: bool
    ) -> None:
        """Keep the trace of a message; a worker reports its own time only."""
        name, trace = message.request_id, message.trace
        if trace.worker_id == worker.worker_id:
            self._traces.attach_prefill(name, message.attempt, trace, is_final, worker.link.clock)

    def _attach_decode(
        self, worker: Worker, message: SequenceTokens | Resumed | HandedOver, trace: DecodeTrace
    ) -> None:
        """As `_attach_prefill`."""
        if trace.worker_id == worker.worker_id:
            clock = worker.link.clock
            self._traces.attach_decode(message.request_id, message.attempt, trace, clock)

    def _current(self, worker: Worker, request_id: str, attempt: int) -> Generation | None:
        """The generation of a message. Counts late messages and those of other workers, and returns
        None."""
        generation = self._generations.get(request_id)
        current = generation.attempt if generation else None
        is_awaited = (
            current is not None
            and current.number == attempt
            and (worker is current.decode or current.involves(worker))
        )
        if not is_awaited:
            self._metrics.stale.inc()
            return None
        return generation
