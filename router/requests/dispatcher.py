"""The life of generations: placed, started on their workers, followed to their last token.

Owns every running generation. It passes events of workers, the fleet and the client to the
generation, carries out the resulting actions, and does the work of the generation's state. The
generation decides what follows an event (`router.requests.machine.generation`). Every wait ends by
the request's deadline. Knows no HTTP and no sockets. Invariant: however `generate` ends, no state
of the request is left here, and no worker computes for it in vain.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

from process.logs import about
from protocol.control_message import ControlMessage
from protocol.errors import (
    DeadlineExceeded,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    RequestError,
    ServiceError,
)
from protocol.messages import (
    Abort,
    AttemptFailed,
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
from router.fleet.fleet import Fleet
from router.fleet.worker import Loss, Worker
from router.metrics import FleetMetrics
from router.requests.actions import ActionRunner
from router.requests.deadline_timer import Deadlines
from router.requests.handover import orders
from router.requests.interface import DeltaSink, GenerationRequest, TokenDelta
from router.requests.launch import Launcher, PlacedListener, legs
from router.requests.loop_turns import Turnstile
from router.requests.machine import states
from router.requests.machine.attempt import Attempt
from router.requests.machine.generation import Generation
from router.requests.machine.resumption import Searching
from router.requests.machine.retries import Retries
from router.requests.machine.states import Action
from router.requests.machine.token_stream import TokenPiece
from router.requests.measurements import Experience
from router.requests.metric_labels import error_label
from router.requests.served_generation import ServedGeneration
from router.requests.trace_store import TraceStore
from router.routing.placement import Targets
from router.settings import RoutingSettings

log = logging.getLogger(__name__)


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
        self._actions = ActionRunner(settings, traces, metrics)
        self._retries = Retries(
            settings.max_attempts, settings.retry_backoff_ms, settings.retry_backoff_max_ms, rng
        )
        self._deadlines = Deadlines(fleet.now)
        self._long_launches = Turnstile()
        self._generations: dict[str, ServedGeneration] = {}
        self._is_stopping = False
        metrics.inflight.set_function(lambda: self.inflight)
        self.on_refused: Callable[[str, str], None] = lambda request_id, reason: None
        """Called with each request that is not admitted, and the reason."""
        self.on_end: Callable[[ServedGeneration], None] = lambda generation: None
        """Called with each generation that has ended, unless a later life of it continues."""

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
        except (RequestError, ServiceError) as refusal:
            self._metrics.refusals.add(error_label(refusal))
            self.on_refused(request.request_id, str(refusal))
            raise
        try:
            with self._deadlines.until(generation.deadline):
                over = await self._follow(generation)
        except TimeoutError:
            error = DeadlineExceeded(
                f"request {request.request_id} was not finished within its deadline; "
                f"attempts: {generation.num_attempts}"
            )
            self._actions.carry_out(generation, generation.end("failed", error))
            raise error from None
        finally:
            self._end(generation)
        if over.error is not None:
            if not generation.trace.attempts:
                self._metrics.refusals.add(error_label(over.error))
            raise over.error
        return generation.stream.token_ids

    def stop(self) -> None:
        """End every generation with an error and start no new one."""
        self._is_stopping = True
        for generation in self._generations.values():
            self._fail(generation, "the router stops", generation.request.is_resumable)

    # -- the steps of a generation, in order ------------------------------------------------

    def _admit(self, request: GenerationRequest, sink: DeltaSink) -> ServedGeneration:
        """Open a generation, or raise the reason why it cannot run."""
        name = request.request_id
        if name in self._generations and not request.life:
            raise InvalidRequest(f"request id {name} is in use")
        if self._is_stopping:
            raise Overloaded("the router stops")
        if len(self._generations) >= self._settings.max_inflight:
            raise Overloaded(f"{self.inflight} generations are running, the most allowed")
        self._launcher.check_length(request)
        deadline = self._fleet.now() + min(
            request.deadline_ms / 1000, self._settings.request_timeout_s
        )
        former = self._generations.get(name)
        if former is not None:  # its client continues here, even if its connection is still open
            self._fail(former, "the stream was resumed elsewhere", is_kept=True)
        trace = self._traces.begin(name, len(request.token_ids))
        generation = ServedGeneration(request, deadline, self._retries, sink, trace)
        self._generations[name] = generation
        if request.life:
            generation.search(self._fleet.known(Role.DECODE))
        return generation

    async def _follow(self, generation: ServedGeneration) -> states.Over:
        """Do the work of the generation's states, one after the other, up to the last one."""
        while True:
            if generation.backlog:
                await self._actions.catch_up(generation)
                continue
            match generation.state:
                case states.Placing():
                    await self._place(generation)
                case Attempt() | states.Complete():
                    await generation.sleep()
                case states.Over() as over:
                    return over
                case Searching() as search:
                    await self._search(generation, search)
                case states.Failed():
                    actions, now_us = generation.recover(), self._traces.wall_us()
                    self._actions.carry_out(generation, actions, now_us)
                case states.Pausing() as pausing:
                    await self._pause(generation, pausing)
                case states.AwaitingRoom():
                    await self._wait_for_room(generation)

    async def _search(self, generation: ServedGeneration, search: Searching) -> None:
        """Ask for the stream until it is found, or no worker can have it, or the time is up."""
        self._ask(generation, search)
        try:
            async with asyncio.timeout(self._settings.resume_wait_s):
                while generation.state is search:
                    await generation.sleep()
        except TimeoutError:
            generation.on_nobody_found()

    def _ask(self, generation: ServedGeneration, search: Searching) -> None:
        """Ask the workers that could not be reached before."""
        question = Resume(request_id=generation.request.request_id, attempt=search.number)
        search.asked |= {each for each in search.unasked if each.link.send(question)}

    async def _place(self, generation: ServedGeneration) -> None:
        """Place the next attempt and start both of its legs at once."""
        if wait_s := self._launcher.wait_s(generation):
            await asyncio.sleep(wait_s)
        if self._launcher.is_long(generation):
            await self._launcher.prepare(generation)
            await self._long_launches.passed()  # last, so that no two open in one turn of the loop
        placing = generation.state
        if not isinstance(placing, states.Placing):
            return
        try:
            attempt = self._launcher.open(generation, placing.source, self._generations.values())
        except (Overloaded, PromptTooLong) as error:
            self._actions.carry_out(generation, generation.on_refused(error))
            return
        generation.on_placed(attempt)
        self._note_attempt(generation, attempt)
        self._metrics.decisions.add(attempt.placement.rule)
        if generation.num_attempts > 1 and placing.source is None:
            self._metrics.retries.inc()
        trace_id, now = generation.trace.trace_id, self._fleet.now()
        for worker, message in legs(generation, attempt, trace_id, now):
            if not worker.link.send(message):
                self._actions.carry_out(generation, generation.on_unreachable(worker))
                return
            attempt.sent(worker)

    def _note_attempt(self, generation: ServedGeneration, attempt: Attempt) -> None:
        generation.note_attempt(attempt, self._traces.wall_us())
        self._metrics.attempts.add(attempt.placement.mode)

    async def _pause(self, generation: ServedGeneration, pausing: states.Pausing) -> None:
        name = generation.request.request_id
        log.info("request %s is tried again: %s", name, pausing.reason, extra=about(name))
        await asyncio.sleep(pausing.pause_s)
        if pausing.pinged is not None:
            keeper, ping = pausing.pinged
            await keeper.link.wait_for_pong(ping, self._settings.silence_s / 4)
        generation.on_paused()

    async def _wait_for_room(self, generation: ServedGeneration) -> None:
        wait_s = self._settings.recovery_wait_s
        try:
            async with asyncio.timeout(wait_s):
                await self._fleet.wait_for_decode(generation.needed_context)
            generation.on_room()
        except TimeoutError:
            generation.on_no_room(wait_s)

    def _fail(self, generation: ServedGeneration, reason: str, is_kept: bool) -> None:
        """End a generation with an error; `is_kept`: its attempt goes on, for a later life."""
        error = GenerationFailed(f"request {generation.request.request_id} failed: {reason}")
        self._actions.carry_out(generation, generation.end("failed", error, is_kept))

    def _end(self, generation: ServedGeneration) -> None:
        """Free all state of a generation; abort it on its workers if it was abandoned."""
        name, outcome = generation.request.request_id, generation.outcome
        if not outcome:
            outcome = "closed"
            self._actions.carry_out(generation, generation.end(outcome))
        over = generation.state
        if isinstance(over, states.Over) and over.error is not None:
            generation.trace.error = over.error.code or over.error.kind
        is_over = self._generations.get(name) is generation
        if is_over:
            del self._generations[name]
        self._traces.end(generation.trace, outcome)
        self._metrics.outcomes.add(outcome)
        if is_over:
            self.on_end(generation)
        if generation.stream.duplicates:
            self._metrics.duplicates.inc(generation.stream.duplicates)

    # -- what workers and the fleet say -------------------------------------------------------

    def on_message(self, worker: Worker, message: ControlMessage) -> None:
        """See `FleetListener`."""
        if isinstance(message, StepTokens):
            now_us = self._traces.wall_us()
            for sequence in message.sequences:
                self._on_sequence(worker, sequence, now_us)
        elif isinstance(message, Resumed):
            self._on_resumed(worker, message)
        elif type(message) in _EVENTS:
            self._on_event(worker, message)
        else:
            self._metrics.refused.add("unexpected")

    def on_fleet(self) -> None:
        """See `FleetListener`. Requests leave draining decode workers if another has room."""
        for order in orders(self._generations.values(), self._fleet.ready(Role.DECODE)):
            attempt = self._generations[order.request_id].attempt
            assert attempt is not None
            attempt.is_leaving = attempt.decode.link.send(order)
        for generation in self._generations.values():
            if isinstance(generation.state, Searching):
                self._ask(generation, generation.state)

    def on_lost(self, worker: Worker, reason: str, loss: Loss) -> int:
        """See `FleetListener`: every attempt on the worker fails at once."""
        num_failed = 0
        for generation in self._generations.values():
            attempt = generation.attempt
            self._actions.carry_out(generation, generation.on_lost(worker, reason, loss))
            num_failed += generation.attempt is not attempt
        return num_failed

    def _on_sequence(self, worker: Worker, sequence: SequenceTokens, now_us: int) -> None:
        if sequence.trace is not None:
            self._actions.attach(worker, sequence, sequence.trace)
        generation = self._generations.get(sequence.request_id)
        if generation is None:
            self._metrics.stale.inc()
            return
        cached = sequence.cached_tokens
        for action in generation.on_tokens(worker, sequence.attempt, sequence, cached):
            if isinstance(action, TokenDelta):  # nearly every one
                self._actions.deliver(generation, action, now_us)
            else:
                self._actions.carry_out(generation, (action,))

    def _on_event(self, worker: Worker, message: Any) -> None:
        """Pass a worker's message to its generation, and carry out the actions that follow."""
        trace = getattr(message, "trace", None)
        if trace is not None:
            self._actions.attach(worker, message, trace)
        generation = self._generations.get(message.request_id)
        if generation is not None:
            actions = _EVENTS[type(message)](generation, worker, message)
            self._actions.carry_out(generation, actions, self._traces.wall_us())
        elif isinstance(message, HandedOver):
            self._turn_away(worker, message.request_id, message.next_attempt)
        elif isinstance(message, (FirstToken, AttemptFailed)):
            self._metrics.stale.inc()

    def _on_resumed(self, worker: Worker, message: Resumed) -> None:
        """Continue a stream on the worker that has it."""
        generation = self._generations.get(message.request_id)
        if generation is None:
            self._turn_away(worker, message.request_id, message.attempt)
            return
        refusal = generation.on_found(worker, message.attempt)
        if refusal:
            self._actions.carry_out(generation, refusal)
            return
        attempt = generation.attempt
        assert attempt is not None, "the generation continues there"
        self._note_attempt(generation, attempt)
        if message.trace is not None:
            self._actions.attach(worker, message, message.trace)
        piece = TokenPiece(0, message.token_ids, message.logprobs, message.finish)
        actions = generation.on_tokens(worker, message.attempt, piece, message.cached_tokens)
        self._actions.carry_out(generation, actions, self._traces.wall_us())
        generation.wake()

    def _turn_away(self, worker: Worker, request_id: str, attempt: int) -> None:
        """Let a worker drop its state of a request that is over."""
        self._metrics.stale.inc()
        worker.link.send(Abort(request_id=request_id, attempt=attempt))


_EVENTS: dict[type, Callable[[Generation, Worker, Any], Sequence[Action]]] = {
    FirstToken: Generation.on_first_token,
    PrefillDone: Generation.on_prefill_done,
    HandedOver: Generation.on_handed_over,
    NotKept: Generation.on_not_kept,
    AttemptFailed: Generation.on_failed,
}
