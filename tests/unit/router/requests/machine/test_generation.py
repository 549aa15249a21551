"""A generation among workers that fail, die, drain and cannot be reached, whose messages are lost,
late, doubled and reordered, and before a client that reads slowly or leaves."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from protocol.errors import Overloaded
from protocol.message_base import Message
from protocol.messages import (
    Abort,
    AttemptFailed,
    FinishReason,
    FirstToken,
    HandedOver,
    NotKept,
    PrefillDone,
    SequenceTokens,
)
from protocol.sampling import SamplingParams
from protocol.traces import DecodeTrace
from router.fleet.worker import Loss
from router.requests.interface import GenerationRequest, TokenDelta
from router.requests.machine import states
from router.requests.machine.attempt import Attempt, Send
from router.requests.machine.generation import Generation
from router.requests.machine.resumption import Searching
from router.requests.machine.retries import MAX_DEATHS, Retries
from router.requests.machine.token_stream import TokenPiece
from router.routing.placement import Candidate, Mode, Placement
from tests.effort import times
from tests.unit.router.fake_worker import prefill_trace

MAX_ATTEMPTS = 3
MAX_TOKENS = 8
MOST_UNREAD = 2
Draw = Callable[[st.SearchStrategy[Any]], Any]
_THREE = st.integers(0, 2)
_FATES = st.sampled_from(["comes", "comes", "comes", "comes twice", "lost"])
TRUTH = [1000 + index for index in range(MAX_TOKENS)]


@dataclass(eq=False)
class Machine:
    """One incarnation of a worker, with the load reserved there."""

    worker_id: str
    reserved: set[int] = field(default_factory=set)
    pings: int = 0
    link: Any = field(default_factory=lambda: SimpleNamespace(last_pong=0))
    is_dead: bool = False

    @property
    def info(self) -> Any:
        return SimpleNamespace(incarnation=self.worker_id)

    def reserve(self, number: int) -> tuple[Any, Any]:
        self.reserved.add(number)
        return self, number

    def release(self, reservation: int) -> None:
        self.reserved.discard(reservation)


@dataclass(eq=False)
class Leg:
    """What a worker does for an attempt, until it ends or is told to end."""

    worker: Machine
    number: int
    next_index: int
    role: str  # "decode", "prefill", or "source" of a handover
    first_index: int = 0


@dataclass
class Flying:
    """A message on its way to the router."""

    worker: Machine
    message: Message


class Course(RuleBasedStateMachine):
    """Checks each token that is delivered, each end of an attempt, and whom a failure blames."""

    @initialize(is_resumed=st.booleans(), num_kept=st.integers(0, 4))
    def begin(self, is_resumed: bool, num_kept: int) -> None:
        self.workers = {role: [Machine(f"{role}{i}") for i in range(3)] for role in "dp"}
        self.num_workers = 3
        self.legs: list[Leg] = []
        self.attempts: list[Attempt] = []  # whose first token is awaited
        self.flying: list[Flying] = []
        self.delivered: list[int] = []
        self.backlog: list[TokenDelta] = []
        self.is_full = self.has_finish = self.is_gone = self.is_kept = False
        self.failures_in_a_row = 0
        request = GenerationRequest(
            request_id="r",
            token_ids=list(range(10)),
            sampling=SamplingParams(max_tokens=MAX_TOKENS, seed=1),
            priority=0,
            deadline_ms=1000,
            cache_salt="",
            life=int(is_resumed),
        )
        retries = Retries(MAX_ATTEMPTS, 1.0, 1.0, random.Random(1))
        self.generation = Generation(request, 1e9, retries)
        if is_resumed:
            decoders: Any = self.workers["d"]
            self.generation.search(decoders)
            self.keeper = self.workers["d"][0]
            self.num_kept = num_kept

    @rule(data=st.data())
    def turn(self, data: st.DataObject) -> None:
        """Something happens, the usual more often than the rest."""
        is_waiting = not self.is_in(Attempt, states.Complete, states.Over)
        usual = [
            *([self.go_on] * 12 * is_waiting),
            *([self.arrive] * 12 * bool(self.flying)),
            *([self.work] * 12 * bool(self.legs)),
            *([self.answer] * 4 * bool(self.generation.request.life)),
            *([self.be_overdue] * 2 * bool(self.attempts)),
        ]
        happen = data.draw(st.sampled_from([*usual, self.read, self.read, self.lose, self.end_it]))
        happen(data.draw)

    # -- the owner ----------------------------------------------------------------------------

    def event(self, actions: Any, to_blame: set[str] | None = None) -> None:
        """Carry out what an event asks for. It may have blamed only these workers."""
        blamed = self.generation.failures.failed - self.blamed_before
        assert blamed <= (to_blame or set())
        for action in actions:
            match action:
                case TokenDelta():
                    self.deliver(action)
                case Send(worker, Abort() as abort):
                    self.abort(worker, abort.attempt)
                case states.AttemptEnded():
                    self.failures_in_a_row += 1
                case states.Probe(worker):
                    worker.pings += 1
                    self.generation.failures.on_probe(worker, worker.pings)
                case states.AwaitFirstToken(attempt):
                    self.attempts.append(attempt)

    @property
    def blamed_before(self) -> set[str]:
        return self._blamed

    def before(self) -> Generation:
        """The generation, for an event."""
        self._blamed = set(self.generation.failures.failed)
        self._state = self.generation.state
        return self.generation

    def abort(self, worker: Machine, number: int) -> None:
        attempt, state = self.generation.attempt, self.generation.state
        if isinstance(state, states.Placing) and number == self.generation.attempt_number:
            assert worker is not state.source, "blocks that are to be handed over are given up"
        if attempt is not None and attempt.number == number:
            assert worker not in (attempt.decode, attempt.prefill), "a running attempt is aborted"
        self.legs = [e for e in self.legs if e.worker is not worker or e.number != number]

    def deliver(self, delta: TokenDelta) -> None:
        if isinstance(self.generation.state, states.Over):
            return
        if self.backlog or self.is_full:
            self.backlog.append(delta)
            if len(self.backlog) > MOST_UNREAD:
                self.event(self.before().on_unread())
        else:
            self.give(delta)

    def give(self, delta: TokenDelta) -> None:
        assert not self.has_finish
        self.delivered += delta.token_ids
        assert self.delivered == TRUTH[: len(self.delivered)]
        if delta.token_ids:
            self.failures_in_a_row = 0
        self.has_finish = delta.finish is not None
        if self.has_finish or self.is_gone:
            self.backlog.clear()
            self.event(self.before().end("finished" if self.has_finish else "closed"))

    def is_in(self, *kinds: type) -> bool:
        return isinstance(self.generation.state, kinds)

    def go_on(self, draw: Draw) -> None:
        """Do what the state says; now and then it fails."""
        luck = draw(st.integers(0, 9))
        match self.generation.state:
            case states.Placing():
                self.place(draw(_THREE), draw(st.none() | _THREE), luck)
            case states.Failed() if not self.backlog:
                self.event(self.before().recover())
            case states.Pausing():
                self.generation.on_paused()
            case states.AwaitingRoom() if luck < 9:
                self.generation.on_room()
            case states.AwaitingRoom():
                self.generation.on_no_room(1.0)
            case Searching() as search if luck < 9:
                search.asked |= search.unasked
            case Searching():
                self.generation.on_nobody_found()

    def place(self, decode: int, prefill: int | None, luck: int) -> None:
        """Start an attempt. With bad luck nobody has room, or a leg cannot be sent."""
        generation = self.before()
        source = generation.state.source
        if luck == 9:
            self.event(generation.on_refused(Overloaded("full")))
            return
        ready: Any = [each for each in self.workers["d"] if each is not source]  # it drains
        d = ready[decode % len(ready)]
        p: Any = None if prefill is None else self.workers["p"][prefill]
        mode = Mode.LOCAL if p is None else Mode.REMOTE
        if source is not None:
            mode, p = Mode.HANDOVER, source
            kept = [e for e in self.legs if (e.worker, e.role) == (source, "source")]
            assert all(each.next_index == len(generation.stream.token_ids) for each in kept)
        number, first = generation.attempt_number, len(generation.stream.token_ids)
        first -= source is not None
        candidate = Candidate(d.worker_id, 0, 0, 0)
        placement = Placement(mode, candidate, None, "", (), (), ())
        reservations = [each.reserve(number) for each in (d, p) if each is not None]
        attempt = Attempt(number, first, placement, d, p, reservations)
        generation.on_placed(attempt)
        sent = [(d, "decode", first + (p is not None))]
        if mode is Mode.REMOTE:
            sent.append((p, "prefill", first))
        for place, (worker, role, index) in enumerate(sent):
            if worker.is_dead or luck == 7 + place:
                self.event(self.before().on_unreachable(worker), {worker.worker_id})
                return
            self.legs.append(Leg(worker, number, index, role, first))

    def be_overdue(self, draw: Draw) -> None:
        """A first token has had its time, in this attempt or a former one."""
        attempt: Any = draw(st.sampled_from(self.attempts))
        late = attempt.prefill or attempt.decode
        self.event(self.before().on_overdue(attempt), {late.worker_id})

    # -- workers ------------------------------------------------------------------------------

    def work(self, draw: Draw) -> None:
        """A worker computes, fails or hands over."""
        leg, count, luck = draw(st.sampled_from(self.legs)), draw(_THREE), draw(st.integers(0, 9))
        if luck == 9:
            self.fail(leg, draw(st.sampled_from(["retryable", "room", "final", "request"])))
        elif luck in (4, 5, 6) and leg.role == "decode":
            self.hand_over(leg, keeps_kv=count > 0)
        else:
            self.compute(leg, count, ends=luck == 7)

    def compute(self, leg: Leg, count: int, ends: bool) -> None:
        sent: Message
        if leg.role == "decode":
            ids = TRUTH[leg.next_index : leg.next_index + count]
            if ids:
                self.finish_prompt(leg.number)
            begins = leg.next_index
            leg.next_index += len(ids)
            is_last = ends or leg.next_index == MAX_TOKENS
            sent = SequenceTokens(
                request_id="r",
                attempt=leg.number,
                index=begins,
                token_ids=ids,
                finish=FinishReason.STOP if is_last else None,
            )
        elif leg.next_index == leg.first_index and leg.role == "prefill":
            trace, index = prefill_trace(leg.worker.worker_id), leg.first_index
            is_last = index == MAX_TOKENS - 1
            sent = FirstToken(
                request_id="r",
                attempt=leg.number,
                index=index,
                token_id=TRUTH[min(index, MAX_TOKENS - 1)],
                finish=FinishReason.STOP if is_last else None,
                trace=trace,
            )
            leg.next_index += 1
        else:
            trace, is_last = prefill_trace(leg.worker.worker_id), True
            sent = PrefillDone(request_id="r", attempt=leg.number, trace=trace)
        if is_last:
            self.legs.remove(leg)
        self.flying.append(Flying(leg.worker, sent))

    def finish_prompt(self, number: int) -> None:
        """A decode worker computes only once it has all KV: its prefill worker is through."""
        for leg in [e for e in self.legs if (e.number, e.role) == (number, "prefill")]:
            while leg in self.legs:
                self.compute(leg, 0, ends=False)

    def fail(self, leg: Leg, kind: str) -> None:
        self.legs.remove(leg)
        sent = AttemptFailed(
            request_id="r",
            attempt=leg.number,
            worker_id=leg.worker.worker_id,
            reason=kind,
            retryable=kind in ("retryable", "room"),
            lacks_room=kind == "room",
            code="grammar_too_slow" if kind == "request" else "",
        )
        self.flying.append(Flying(leg.worker, sent))

    def hand_over(self, leg: Leg, keeps_kv: bool) -> None:
        self.legs.remove(leg)
        if keeps_kv:
            self.legs.append(Leg(leg.worker, leg.number + 1, leg.next_index, "source"))
        sent = HandedOver(
            request_id="r",
            attempt=leg.number,
            next_attempt=leg.number + 1,
            num_output=leg.next_index,
            keeps_kv=keeps_kv,
            trace=DecodeTrace(worker_id=leg.worker.worker_id, received_us=1),
        )
        self.flying.append(Flying(leg.worker, sent))

    def arrive(self, draw: Draw) -> None:
        """Any message, mostly the next one, whenever it was sent."""
        is_next, fate = draw(st.integers(0, 5)) < 5, draw(_FATES)
        flying = self.flying[0] if is_next else draw(st.sampled_from(self.flying))
        if fate != "comes twice":
            self.flying.remove(flying)
        if fate == "lost":
            if isinstance(flying.message, HandedOver):  # its worker gives its blocks up in time
                self.legs = [
                    e for e in self.legs if (e.worker, e.role) != (flying.worker, "source")
                ]
            return
        worker: Any = flying.worker
        message: Any = flying.message
        generation = self.before()
        attempt: Any = generation.attempt
        is_current = attempt is not None and attempt.number == message.attempt
        is_current = is_current and attempt.involves(worker)
        to_blame = {worker.worker_id} if is_current else set()
        match message:
            case SequenceTokens():
                actions = generation.on_tokens(worker, message.attempt, message, None)
            case FirstToken():
                actions = generation.on_first_token(worker, message)
            case PrefillDone():
                actions = generation.on_prefill_done(worker, message)
            case HandedOver():
                actions, to_blame = generation.on_handed_over(worker, message), set()
            case _:
                if is_current and attempt.prefill is not None and not attempt.decode_runs:
                    to_blame.add(attempt.prefill.worker_id)
                actions = generation.on_failed(worker, message)
        if not is_current:
            assert self.generation.state is self._state, "it is not of the current attempt"
        self.event(actions, to_blame)

    def lose(self, draw: Draw) -> None:
        """A worker is lost, and another incarnation takes its place; others answer their pings."""
        role, index, loss = draw(st.sampled_from("dp")), draw(_THREE), draw(st.sampled_from(Loss))
        worker: Any = self.workers[role][index]
        for each in self.workers["d" if role == "p" else "p"]:
            each.link.last_pong = each.pings
        worker.is_dead = True
        self.num_workers += 1
        self.workers[role][index] = Machine(f"{role}{self.num_workers}")
        self.legs = [each for each in self.legs if each.worker is not worker]
        generation = self.before()
        attempt = generation.attempt
        is_hit = attempt is not None and attempt.involves(worker)
        actions = generation.on_lost(worker, "it died", loss)
        self.event(actions, {worker.worker_id} if is_hit else None)

    # -- the search for a kept stream -----------------------------------------------------------

    def answer(self, draw: Draw) -> None:
        """A worker that was asked for the stream answers, or one that was not; perhaps twice."""
        worker: Any = self.workers["d"][draw(_THREE)]
        number = (1 << 16) + draw(st.sampled_from([1, 1, 2]))
        generation = self.before()
        if worker is not self.keeper:
            answer = NotKept(request_id="r", attempt=number)
            self.event(generation.on_not_kept(worker, answer))
            return
        refusal = generation.on_found(worker, number)
        self.event(refusal)
        if not refusal:
            self.legs.append(Leg(worker, number, self.num_kept, "decode"))
            piece = TokenPiece(0, TRUTH[: self.num_kept], None, None)
            self.event(self.before().on_tokens(worker, number, piece, 0), {worker.worker_id})

    # -- the client and the end -----------------------------------------------------------------

    def read(self, draw: Draw) -> None:
        """The client reads what waits, then no more for a while, or goes away."""
        while self.backlog:
            self.give(self.backlog.pop(0))
        self.is_full, self.is_gone = draw(st.booleans()), draw(st.integers(0, 15)) == 15

    def end_it(self, draw: Draw) -> None:
        """Its deadline is over, or a later life of the stream has begun."""
        if not self.is_in(states.Over) and draw(st.integers(0, 5)) == 5:
            self.is_kept = draw(st.booleans())
            self.event(self.before().end("failed", Overloaded("it is over"), self.is_kept))

    def teardown(self) -> None:
        if hasattr(self, "generation"):
            self.event(self.before().end("closed"))
            self.no_attempt_is_left_without_its_end()

    # -- what always holds ----------------------------------------------------------------------

    @invariant()
    def no_attempt_is_left_without_its_end(self) -> None:
        attempt = self.generation.attempt
        number = 0 if attempt is None else attempt.number
        for each in [worker for all_of in self.workers.values() for worker in all_of]:
            assert each.reserved <= {number}
        if self.is_kept or self.is_in(states.Complete) or self.has_finish:
            return  # it goes on elsewhere; or its workers know of its end
        announced = {
            (each.worker, each.message.next_attempt)
            for each in self.flying
            if isinstance(each.message, HandedOver)
        }
        for leg in self.legs:
            is_current = attempt is not None and leg.number == number
            is_source = self.is_in(states.Placing) and self.generation.state.source is leg.worker
            assert is_current or is_source or (leg.worker, leg.number) in announced

    @invariant()
    def tries_and_deaths_are_bounded(self) -> None:
        failures = self.generation.failures
        assert self.failures_in_a_row <= MAX_ATTEMPTS + MAX_DEATHS
        assert failures.num_failures <= MAX_ATTEMPTS

    @invariant()
    def the_stream_is_what_was_delivered_and_what_waits(self) -> None:
        waiting = [token for each in self.backlog for token in each.token_ids]
        if not self.is_in(states.Over):
            assert self.delivered + waiting == self.generation.stream.token_ids


TestCourse = Course.TestCase
TestCourse.settings = settings(
    max_examples=times(60, 600), stateful_step_count=60, deadline=None, derandomize=True
)
