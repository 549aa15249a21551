"""One request from its admission to its end: events in, actions out.

Pure: the owner of a generation reports events to it, carries out the actions that each event
returns, in their order, and does the work of its state. Events may be late, doubled or out of
order; an event that does not fit the state is ignored. Invariants: each token is delivered once and
in order; every attempt and every reservation ends; a worker is avoided only for its own faults.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from protocol.errors import (
    GenerationFailed,
    Overloaded,
    PromptTooLong,
    ProtocolError,
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
)
from router.fleet.worker import Loss, Worker
from router.requests.interface import GenerationRequest, TokenDelta
from router.requests.machine import states
from router.requests.machine.attempt import Attempt, Send
from router.requests.machine.resumption import Searching, placement_of
from router.requests.machine.retries import FailureHistory, Retries
from router.requests.machine.states import Action, Failure
from router.requests.machine.token_stream import Piece, TokenPiece, TokenStream
from router.requests.metric_labels import failure_kind
from router.routing.placement import Mode

_LIFE_BITS = 16
_STALE: tuple[Action, ...] = (states.CountStale(),)


class Generation:
    """The states of one request. Its token stream and failure history outlive attempts."""

    def __init__(self, request: GenerationRequest, deadline: float, retries: Retries) -> None:
        sampling = request.sampling
        num_scored = 0 if sampling.prompt_logprobs is None else len(request.token_ids)
        self.request = request
        self.deadline = deadline
        self.state: states.State = states.Placing()
        self.stream = TokenStream(num_scored, sampling.max_tokens)
        self.failures = FailureHistory()
        self.num_attempts = 1
        """Attempts so far, including the one that is to be placed."""
        self.cached_tokens = 0
        self.session = ""
        """The session that the first attempt belonged to."""
        self._retries = retries

    @property
    def attempt(self) -> Attempt | None:
        """The attempt that runs."""
        return self.state if isinstance(self.state, Attempt) else None

    @property
    def outcome(self) -> str:
        """How the request ended; "" until then."""
        return self.state.outcome if isinstance(self.state, states.Over) else ""

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.request.token_ids) + len(self.stream.token_ids)

    @property
    def most_output_left(self) -> int:
        """The most output tokens that are still to come."""
        return self.request.sampling.max_tokens - len(self.stream.token_ids)

    @property
    def needed_context(self) -> int:
        """The context that a worker must offer, in tokens: the prompt and the requested output.
        Without a limit on the output, the output counts as half of the largest possible one, but as
        at least one token more than there are now."""
        sampling, prompt = self.request.sampling, len(self.request.token_ids)
        if not self.request.is_open_ended:
            return prompt + sampling.max_tokens
        return max(
            self.num_tokens + 1, prompt + sampling.min_tokens, prompt + -(-sampling.max_tokens // 2)
        )

    @property
    def attempt_number(self) -> int:
        """The latest attempt's number. Each life numbers its attempts above those of former
        lives, so that attempts of another router always count as older."""
        return (self.request.life << _LIFE_BITS) + self.num_attempts

    # -- until an attempt runs ----------------------------------------------------------------

    def search(self, workers: Iterable[Worker]) -> None:
        """First look for the stream on these workers, one of which may keep it."""
        self.state = Searching(self.attempt_number, set(workers))
        self._end_vain_search(self.state)

    def on_not_kept(self, worker: Worker, message: NotKept) -> Sequence[Action]:
        """Note that a worker does not have the stream."""
        state = self.state
        if isinstance(state, Searching) and state.is_answer(worker, message.attempt):
            state.rule_out(worker)
            self._end_vain_search(state)
        return ()

    def on_nobody_found(self) -> None:
        """End the search: its time is up."""
        if isinstance(self.state, Searching):
            self._place_next()

    def on_found(self, worker: Worker, number: int) -> Sequence[Action]:
        """Continue the generation on the worker that has the stream. Ignored if nobody asked, or if
        another worker was first."""
        state = self.state
        if isinstance(state, Searching) and state.is_answer(worker, number):
            placement = placement_of(worker)
            self.state = Attempt(number, 0, placement, worker, None, [], decode_runs=True)
            return ()
        is_used = number == self.attempt_number and self._uses(worker)  # the answer came twice
        return _STALE if is_used else [*_STALE, self._free(worker, number)]

    def on_placed(self, attempt: Attempt) -> None:
        """Begin the next attempt, which has its workers now; its legs are to be sent."""
        assert isinstance(self.state, states.Placing), "one attempt at a time"
        self.state = attempt
        self.stream.start_attempt(is_remote=attempt.placement.mode is Mode.REMOTE)

    def on_refused(self, error: Overloaded | PromptTooLong) -> Sequence[Action]:
        """No worker takes the next attempt. Ends a request that never ran."""
        assert isinstance(self.state, states.Placing), "only the next attempt is refused"
        actions = self._free_source(self.state)
        is_overload = isinstance(error, Overloaded)
        self.state = states.Failed(Failure(str(error), is_overload, lacks_room=is_overload))
        if self.num_attempts == 1:
            self.state = states.Over("failed", error)
        return actions

    def on_unreachable(self, worker: Worker) -> Sequence[Action]:
        """A leg of the attempt that was just placed could not be sent."""
        return self._fail(worker, f"{worker.worker_id} cannot be reached", has_leg=False)

    # -- while an attempt runs ----------------------------------------------------------------

    def on_tokens(
        self, worker: Worker, number: int, piece: Piece, cached_tokens: int | None
    ) -> Sequence[Action]:
        """Tokens came from a worker of attempt `number`. The attempt found `cached_tokens` of the
        prompt in a cache. Delivers the new tokens. Tokens that do not follow the earlier ones fail
        the attempt."""
        attempt, stream = self.state, self.stream
        if type(attempt) is not Attempt or number != attempt.number:
            return _STALE
        if worker is not attempt.decode and not attempt.involves(worker):
            return _STALE
        if cached_tokens is not None and not stream.token_ids:
            self.cached_tokens = cached_tokens
        if attempt.reservations:
            attempt.release(worker)
        try:
            fresh = stream.take(piece)
        except ProtocolError as error:
            return self._fail(worker, f"{worker.worker_id}: {error}")
        if fresh and self.num_attempts > 1:  # a first attempt follows no failure
            self.failures.on_progress(attempt, len(stream.token_ids) - attempt.first_index)
        cached = self.cached_tokens
        actions: list[Action] = []
        for each in fresh:
            actions.append(
                TokenDelta(each.token_ids, each.logprobs, each.finish, cached, each.prompt_logprobs)
            )
        if stream.finish is not None:
            attempt.close()
            self.state = states.Complete()
            return actions
        if not attempt.decode_runs and len(stream.token_ids) - attempt.first_index > 1:
            attempt.decode_runs = True  # only the decode worker produces more than one token
        if stream.held and not attempt.is_watched:
            attempt.is_watched = True
            actions.append(states.AwaitFirstToken(attempt))
        return actions

    def on_first_token(self, worker: Worker, message: FirstToken) -> Sequence[Action]:
        """The prefill worker has chosen the attempt's first token."""
        logprobs = None if message.logprobs is None else [message.logprobs]
        ids, prompt_logprobs = [message.token_id], message.prompt_logprobs
        piece = TokenPiece(message.index, ids, logprobs, message.finish, prompt_logprobs)
        return self.on_tokens(worker, message.attempt, piece, message.trace.not_computed)

    def on_overdue(self, attempt: Attempt) -> Sequence[Action]:
        """Tokens that overtook the attempt's first one have waited long enough for it."""
        if self.state is not attempt or not self.stream.held:
            return ()
        source = attempt.prefill or attempt.decode
        return self._fail(source, f"{source.worker_id}: its first token did not come")

    def on_prefill_done(self, worker: Worker, message: PrefillDone) -> Sequence[Action]:
        """All KV has arrived: the attempt no longer depends on the prefill worker."""
        attempt = self.attempt
        if attempt and attempt.number == message.attempt and worker is attempt.prefill:
            attempt.is_moved = True
            attempt.release_pair()
        return ()

    def on_failed(self, worker: Worker, message: AttemptFailed) -> Sequence[Action]:
        """A worker reports that an attempt failed there."""
        attempt = self.attempt
        if attempt is None or not attempt.awaits(worker, message.attempt):
            return _STALE
        if message.lacks_room:
            self.failures.avoid(worker)
        elif not message.code:
            self.failures.on_report(attempt, worker)
        failure = Failure(
            f"{worker.worker_id}: {message.reason}",
            message.retryable,
            message.lacks_room,
            message.code,
            message.computed_tokens,
        )
        return self._end_attempt(attempt, failure, worker)

    def on_lost(self, worker: Worker, reason: str, loss: Loss) -> Sequence[Action]:
        """A worker, or the connection to it, is lost."""
        state = self.state
        if isinstance(state, Attempt) and state.involves(worker):
            probed = self.failures.on_loss(state, worker, loss)
            failure = Failure(f"{worker.worker_id}: {reason}")
            ended = self._end_attempt(state, failure, worker, loss)
            return [*ended, *map(states.Probe, probed)]
        if isinstance(state, Searching):
            state.rule_out(worker)
            self._end_vain_search(state)
        elif isinstance(state, states.Placing) and state.source is worker:
            self.state = states.Placing()
        if loss is Loss.BROKEN:
            self.failures.count_late_death(worker)
        return ()

    def on_handed_over(self, worker: Worker, message: HandedOver) -> Sequence[Action]:
        """A draining worker ended its part of the request: the next attempt starts elsewhere."""
        attempt, number = self.attempt, message.next_attempt
        if attempt is None or not attempt.awaits(worker, message.attempt):
            is_used = number == self.attempt_number and self._uses(worker)
            return _STALE if is_used else [*_STALE, self._free(worker, number)]
        if number != self.attempt_number + 1:
            return [self._free(worker, number)]
        attempt.close()
        actions: list[Action] = []
        if attempt.prefill is not None and attempt.involves(attempt.prefill):
            actions += self._aborts(attempt, "its decode worker drains", worker)
        has_all = message.num_output == len(self.stream.token_ids)
        if message.keeps_kv and not has_all:
            actions.append(self._free(worker, number))
        self._place_next(worker if message.keeps_kv and has_all else None)
        return actions

    # -- after a failure ----------------------------------------------------------------------

    def recover(self) -> Sequence[Action]:
        """Leave the state `Failed`: the client has everything that came before."""
        assert isinstance(self.state, states.Failed)
        failure, failures, name = self.state.failure, self.failures, self.request.request_id
        if failure.code:
            error = UnusableConstraint(f"request {name} failed: {failure.reason}", failure.code)
            self.state = states.Over("failed", error)
        elif not failure.retryable:
            self._give_up(failure.reason)
        elif len(self.stream.token_ids) >= self.request.sampling.max_tokens:
            self.state = states.Complete()
            return [TokenDelta([], finish=FinishReason.LENGTH)]
        else:
            try:
                pause_s = self._retries.pause_s(
                    name, failures, self.num_attempts, failure.reason, failure.lacks_room
                )
                self.state = states.Pausing(pause_s, failures.pinged_keeper, failure.reason)
            except (GenerationFailed, Overloaded) as error:
                self.state = states.Over("failed", error)
        return ()

    def on_paused(self) -> None:
        """The pause is over, and the ping was answered or has timed out."""
        if isinstance(self.state, states.Pausing):
            self.state = states.AwaitingRoom(self.state.reason)

    def on_room(self) -> None:
        """A decode worker that accepts the request is ready."""
        if isinstance(self.state, states.AwaitingRoom):
            self._place_next()

    def on_no_room(self, waited_s: float) -> None:
        """No decode worker has become ready within `waited_s`."""
        if isinstance(self.state, states.AwaitingRoom):
            late = f"no decode worker came back within {waited_s:g} s"
            self._give_up(f"{self.state.reason}; {late}")

    # -- the end ------------------------------------------------------------------------------

    def on_unread(self) -> Sequence[Action]:
        """The client does not read its tokens. Ends the attempt without blaming a worker."""
        attempt, reason = self.attempt, "its client does not read"
        if attempt is None:
            return ()
        attempt.close()
        self.state = states.Failed(Failure(reason, retryable=False))
        ended = states.AttemptEnded(attempt, self.state.failure)
        return [ended, *self._aborts(attempt, reason)]

    def end(
        self, outcome: str, error: RequestError | ServiceError | None = None, is_kept: bool = False
    ) -> Sequence[Action]:
        """End the generation in any state. With `is_kept` its attempt continues, for a later life
        of the stream."""
        state = self.state
        if isinstance(state, states.Over):
            return ()
        self.state = states.Over(outcome, error)
        if isinstance(state, Attempt):
            state.close()
            return () if is_kept else self._aborts(state, outcome)
        return self._free_source(state) if isinstance(state, states.Placing) else ()

    # -- steps of several events --------------------------------------------------------------

    def _place_next(self, source: Worker | None = None) -> None:
        self.num_attempts += 1
        self.state = states.Placing(source)

    def _uses(self, worker: Worker) -> bool:
        """Whether the attempt that runs, or is to be placed, has a leg on this worker."""
        state = self.state
        if isinstance(state, states.Placing):
            return worker is state.source
        return isinstance(state, Attempt) and worker in (state.decode, state.prefill)

    def _end_vain_search(self, search: Searching) -> None:
        if not search.waiting:
            self._place_next()

    def _give_up(self, reason: str) -> None:
        error = GenerationFailed(f"request {self.request.request_id} failed: {reason}")
        self.state = states.Over("failed", error)

    def _fail(self, worker: Worker, reason: str, has_leg: bool = True) -> Sequence[Action]:
        """End the attempt because of what a worker did, or did not do."""
        attempt = self.state
        assert isinstance(attempt, Attempt), "only a running attempt fails"
        self.failures.blame(attempt, worker)
        return self._end_attempt(attempt, Failure(reason), None if has_leg else worker)

    def _end_attempt(
        self, attempt: Attempt, failure: Failure, ended: Worker | None, loss: Loss | None = None
    ) -> Sequence[Action]:
        """End an attempt that failed; its legs are aborted, except on the worker `ended`."""
        attempt.close()
        self.state = states.Failed(failure)
        kind = failure_kind(failure.retryable, failure.lacks_room, loss)
        reason = failure.reason if failure.code else "another leg failed"
        aborts = self._aborts(attempt, reason, ended)
        return [states.AttemptEnded(attempt, failure, kind), *aborts]

    def _aborts(self, attempt: Attempt, reason: str, ended: Worker | None = None) -> list[Action]:
        """Tell both legs to drop the attempt, except one that has ended."""
        abort = Abort(request_id=self.request.request_id, attempt=attempt.number, reason=reason)
        legs = (attempt.decode, attempt.prefill)
        return [Send(each, abort) for each in legs if each is not None and each is not ended]

    def _free(self, worker: Worker, number: int) -> Send:
        """Let a worker drop its state for an attempt that does not come."""
        return Send(worker, Abort(request_id=self.request.request_id, attempt=number))

    def _free_source(self, placing: states.Placing) -> Sequence[Action]:
        source = placing.source
        return () if source is None else [self._free(source, self.attempt_number)]
