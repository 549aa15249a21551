"""What the dispatcher remembers of one generation while it runs.

A generation has one attempt at a time, on a decode worker and perhaps a prefill worker; its
token stream outlives the attempts. Nothing here waits.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from protocol.messages import Abort
from protocol.registration import WorkerState
from router.fleet.worker import Loss, Reservation, Worker
from router.requests.generation import DeltaSink, GenerationRequest, TokenDelta
from router.requests.single_reader_queue import Mailbox
from router.requests.token_stream import TokenStream
from router.requests.trace import AttemptTrace, RequestTrace
from router.routing.policy import Mode, Placement

_LIFE_BITS = 16


class End:
    """Nothing more is wanted of a generation: it finished, or whoever took its deltas is done."""


@dataclass(frozen=True)
class Failure:
    """How an attempt ended without finishing its generation."""

    reason: str
    retryable: bool


@dataclass
class Attempt:
    """One try: its workers, and the load they were charged with for it.

    `first_index` is the output index of the first token that this attempt produces. `prefill` is
    where its KV comes from, if from elsewhere: a prefill worker, or the decode worker that hands
    the request over. `is_leaving` says that its own decode worker was asked to hand it over,
    `is_moved` that all KV has arrived there.
    """

    number: int
    first_index: int
    placement: Placement
    decode: Worker
    prefill: Worker | None
    reservations: list[tuple[Worker, Reservation]]
    decode_runs: bool = False
    is_moved: bool = False
    is_leaving: bool = False
    gap_timer: asyncio.TimerHandle | None = None

    def involves(self, worker: Worker) -> bool:
        """Whether the attempt still depends on a worker.

        Once the decode worker holds all KV, and shows that by a token after the first if nobody
        said so, it no longer matters what becomes of the prefill worker.
        """
        needs_prefill = not (self.is_moved or self.decode_runs)
        return worker is self.decode or (worker is self.prefill and needs_prefill)

    @property
    def may_leave(self) -> bool:
        """Whether its decode worker drains, and was not asked yet to hand it over."""
        return self.decode.info.state is WorkerState.DRAINING and not self.is_leaving

    def release(self, worker: Worker) -> None:
        """Take back what a worker was charged with."""
        if not self.reservations:
            return
        for owner, reservation in self.reservations:
            if owner is worker:
                owner.release(reservation)
        self.reservations = [each for each in self.reservations if each[0] is not worker]

    def close(self) -> None:
        """Take back every charge and stop the timer."""
        for owner, reservation in self.reservations:
            owner.release(reservation)
        if self.gap_timer is not None:
            self.gap_timer.cancel()

    def abort(self, request_id: str, reason: str, failed: Worker | None = None) -> None:
        """Tell both legs to forget the attempt; the one that failed knows."""
        for worker in (self.decode, self.prefill):
            if worker is not None and worker is not failed:
                worker.link.send(Abort(request_id=request_id, attempt=self.number, reason=reason))


@dataclass
class Generation:
    """A request on its way to its last token. `failed` holds incarnations of workers.

    `num_failures` counts attempts that failed since the last new token, `num_deaths` workers that
    died under it since a decode worker computed one: a request that gets on is not to blame for
    what dies around it, and none for workers that stood still. Of the legs of an attempt
    (`suspects`) the second to fall counts as another death if it was alive after the first one's:
    then it has answered the ping of that number. A decode worker may report a failed handoff before
    it is known here that the other end (`deserted`) has died. Deltas go straight to the sink; once
    it was full (`is_behind`) they queue up among the events until it has caught up.
    """

    request: GenerationRequest
    sink: DeltaSink
    deadline: float
    trace: RequestTrace
    stream: TokenStream = field(init=False)
    events: Mailbox[TokenDelta | Failure | End] = field(default_factory=Mailbox)
    attempt: Attempt | None = None
    num_attempts: int = 0
    num_failures: int = 0
    num_deaths: int = 0
    suspects: dict[str, int | None] = field(default_factory=dict)
    deserted: Worker | None = None
    cached_tokens: int = 0
    failed: set[str] = field(default_factory=set)
    failed_handoffs: set[str] = field(default_factory=set)
    prefer_decode: str | None = None
    is_behind: bool = False
    is_ended: bool = False
    outcome: str = "closed"

    def __post_init__(self) -> None:
        is_scored = self.request.sampling.prompt_logprobs is not None
        self.stream = TokenStream(len(self.request.token_ids) if is_scored else 0)

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.request.token_ids) + len(self.stream.token_ids)

    @property
    def max_tokens(self) -> int:
        """Prompt and all the output that there may be."""
        return len(self.request.token_ids) + self.request.sampling.max_tokens

    @property
    def attempt_number(self) -> int:
        """Of the latest attempt. Each life has numbers of its own, above those of former lives, so
        that whatever another router's attempts left behind is older."""
        return (self.request.life << _LIFE_BITS) + self.num_attempts

    def begin(self, attempt: Attempt, now_us: int) -> None:
        """From now on this attempt's messages count, and no other's."""
        self.attempt = attempt
        self.stream.start_attempt(is_remote=attempt.placement.mode is Mode.REMOTE)
        self.trace.attempts.append(AttemptTrace(attempt.number, attempt.placement, now_us))

    def drop_attempt(self) -> Attempt | None:
        """From now on no message counts. Returns the attempt that ran, closed, if one did."""
        attempt, self.attempt = self.attempt, None
        if attempt is not None:
            attempt.close()
        return attempt

    def takes_from(self, worker: Worker) -> bool:
        """Whether the attempt that runs gets its KV from this worker."""
        return self.attempt is not None and self.attempt.prefill is worker

    def note_cached(self, cached_tokens: int) -> None:
        """How much of the prompt was cached when it was first computed."""
        if self.num_attempts == 1 and not self.cached_tokens:
            self.cached_tokens = min(cached_tokens, len(self.request.token_ids))

    def deliver(self, delta: TokenDelta) -> None:
        """Give a new delta to the sink, or keep it until the sink has caught up."""
        if self.is_behind or self.sink.is_full:
            self.is_behind = True
            self.events.put(delta)
        else:
            self.hand_over(delta)

    def hand_over(self, delta: TokenDelta) -> None:
        """Give the next delta to the sink; after the last one `End` is among the events."""
        if self.is_ended:
            return
        wants_more = self.sink.take(delta)
        if delta.finish is not None:
            self.outcome = "finished"
        if delta.finish is not None or not wants_more:
            self.is_ended = True
            self.events.put(End())

    async def catch_up(self, delta: TokenDelta) -> None:
        """Give a delta that was kept to the sink, as soon as that has room."""
        while self.sink.is_full and not self.is_ended:
            await self.sink.wait_room()
        self.hand_over(delta)
        self.is_behind = bool(self.events)

    def got_on(self, attempt: Attempt) -> None:
        """A new token came: no failure before it counts any more, nor a death, unless it is the one
        that a prefill worker gives in every attempt: what comes after it may be what kills."""
        self.num_failures = 0
        num_new = len(self.stream.token_ids) - attempt.first_index
        if attempt.prefill is None or num_new > 1:
            self.num_deaths = 0
            self.suspects.clear()
            self.deserted = None

    def blame(self, attempt: Attempt, worker: Worker, loss: Loss | None) -> None:
        """Remember whom the next attempt avoids, and whom it prefers.

        A handoff that fails is reported by its decode worker, but mostly the other end or the
        way between them is at fault: the first time the decode worker keeps the request, with
        whatever blocks arrived, and only the prefill worker is avoided.
        """
        if loss is Loss.BROKEN:
            self._count_death(attempt, worker)
        self.prefer_decode = None
        incarnation = worker.info.incarnation
        in_handoff = not attempt.decode_runs and loss is None
        if worker is attempt.prefill:
            self.prefer_decode = attempt.decode.worker_id
        elif attempt.prefill and in_handoff and incarnation not in self.failed_handoffs:
            self.failed_handoffs.add(incarnation)
            self.deserted = attempt.prefill
            self.prefer_decode = worker.worker_id
            incarnation = attempt.prefill.info.incarnation
        self.failed.add(incarnation)

    def blame_late(self, worker: Worker) -> None:
        """The end that a failed handoff came from is gone: a death, seen after the failure. Whoever
        reported that outlived it."""
        if self.deserted is worker:
            self.deserted = None
            if worker.info.incarnation not in self.suspects:
                self.num_deaths += 1
                self.suspects[worker.info.incarnation] = None

    async def hear(self, keeper: Worker | None, timeout_s: float) -> None:
        """Wait until whoever is to keep the request, if a worker died beside it, has shown that it
        lives: if it dies over it then, that is another death."""
        asked = self.suspects.get(keeper.info.incarnation) if keeper is not None else None
        if keeper is not None and asked is not None:
            await keeper.link.hear(asked, timeout_s)

    def _count_death(self, attempt: Attempt, worker: Worker) -> None:
        """Once for each worker, and once for both legs of the attempt if they fell together."""
        if not self._fell_before(worker):
            self.num_deaths += 1
            for each in (attempt.decode, attempt.prefill):
                if each is not None and each is not worker:
                    self.suspects.setdefault(each.info.incarnation, each.link.ping())
        self.suspects[worker.info.incarnation] = None

    def _fell_before(self, worker: Worker) -> bool:
        """Whether its death is counted already, by itself or with that of another leg."""
        incarnation = worker.info.incarnation
        if incarnation not in self.suspects:
            return False
        asked = self.suspects[incarnation]
        return asked is None or not worker.link.has_answered(asked)
