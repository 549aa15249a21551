"""One generation while it runs: its attempts, its tokens in order, and its pending events.

A generation has one attempt at a time. Its token stream and failure history outlive attempts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from router.fleet.worker import Worker
from router.requests.attempt import Attempt
from router.requests.interface import DeltaSink, GenerationRequest, TokenDelta
from router.requests.loop_queues import Mailbox
from router.requests.retries import FailureHistory
from router.requests.token_stream import TokenStream
from router.requests.trace import AttemptTrace, RequestTrace
from router.routing.view import Mode

_LIFE_BITS = 16


class End:
    """The generation is over: it finished, or its consumer went away."""


@dataclass(frozen=True)
class Failure:
    """Why an attempt ended without finishing its generation. `lacks_room`: only because no worker
    has room now. `code`: set if the request itself is at fault, see `UnusableConstraint`."""

    reason: str
    retryable: bool = True
    lacks_room: bool = False
    code: str = ""


@dataclass
class Generation:
    """A request on its way to its last token.

    Deltas go directly to the sink. When the sink is full (`is_behind`), deltas queue up among the
    events until it has caught up. `session` is the one that its first attempt belonged to.
    """

    request: GenerationRequest
    sink: DeltaSink
    deadline: float
    trace: RequestTrace
    stream: TokenStream = field(init=False)
    events: Mailbox[TokenDelta | Failure | End] = field(default_factory=Mailbox)
    attempt: Attempt | None = None
    num_attempts: int = 0
    failures: FailureHistory = field(default_factory=FailureHistory)
    cached_tokens: int = 0
    session: str = ""
    is_behind: bool = False
    is_ended: bool = False
    outcome: str = "closed"

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        is_scored = sampling.prompt_logprobs is not None
        num_scored = len(self.request.token_ids) if is_scored else 0
        self.stream = TokenStream(num_scored, sampling.max_tokens)

    @property
    def is_idle(self) -> bool:
        """Whether no attempt runs and no event waits, so that the next attempt may start."""
        return self.attempt is None and not self.events

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.request.token_ids) + len(self.stream.token_ids)

    @property
    def max_tokens(self) -> int:
        """Prompt tokens plus the most output tokens allowed."""
        return len(self.request.token_ids) + self.request.sampling.max_tokens

    @property
    def needed_context(self) -> int:
        """The context that a worker must offer, in tokens: the prompt and the requested output.
        Without a limit, half of the largest possible output, and at least one token more than there
        is."""
        if not self.request.is_open_ended:
            return self.max_tokens
        sampling, prompt = self.request.sampling, len(self.request.token_ids)
        return max(
            self.num_tokens + 1, prompt + sampling.min_tokens, prompt + -(-sampling.max_tokens // 2)
        )

    @property
    def attempt_number(self) -> int:
        """The latest attempt's number. Each life numbers its attempts above those of former
        lives, so that attempts of another router always count as older."""
        return (self.request.life << _LIFE_BITS) + self.num_attempts

    def begin(self, attempt: Attempt, now_us: int) -> None:
        """Accept messages of this attempt only."""
        self.attempt = attempt
        self.stream.start_attempt(is_remote=attempt.placement.mode is Mode.REMOTE)
        source = "" if attempt.prefill is None else attempt.prefill.worker_id
        trace = AttemptTrace(attempt.number, attempt.placement, now_us, source)
        trace.block_size = attempt.block_size
        self.trace.attempts.append(trace)

    def drop_attempt(self) -> Attempt | None:
        """Accept no more messages. Closes and returns the running attempt, if any."""
        attempt, self.attempt = self.attempt, None
        if attempt is not None:
            attempt.close()
        return attempt

    def takes_from(self, worker: Worker) -> bool:
        """Whether the running attempt gets its KV from this worker."""
        return self.attempt is not None and self.attempt.prefill is worker

    def note_cached(self, cached_tokens: int) -> None:
        """Note how many prompt tokens the running attempt did not compute. The number counts if
        this attempt gives the first token."""
        if not self.stream.token_ids:
            self.cached_tokens = cached_tokens

    def deliver(self, delta: TokenDelta) -> None:
        """Give a new delta to the sink, or queue it until the sink has caught up."""
        if self.is_behind or self.sink.is_full:
            self.is_behind = True
            self.events.put(delta)
        else:
            self.hand_over(delta)

    def hand_over(self, delta: TokenDelta) -> None:
        """Give the next delta to the sink; after the last one, put `End` among the events."""
        if self.is_ended:
            return
        wants_more = self.sink.take(delta)
        if delta.finish is not None:
            self.outcome = "finished"
        if delta.finish is not None or not wants_more:
            self.is_ended = True
            self.events.put(End())

    async def catch_up(self, delta: TokenDelta) -> None:
        """Give a queued delta to the sink as soon as it has room."""
        while self.sink.is_full and not self.is_ended:
            await self.sink.wait_room()
        self.hand_over(delta)
        self.is_behind = bool(self.events)
