"""The interface between the gateway and the router, which talks to workers.

The gateway turns one HTTP request into one or more `GenerationRequest`s (prompts x n) and takes
`TokenDelta`s. An implementation of `Generator` decides where a request runs and hides retries.
Nothing here knows HTTP, text or workers. Deltas of one request arrive in order, without gaps or
duplicates, and the last one carries `finish`. They are pushed as soon as a worker's message is
read: waking a task for each token would cost more than processing the token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from protocol.messages import FinishReason
from protocol.retention import RetentionHint
from protocol.sampling import PromptLogprobs, SamplingParams, TokenLogprobs
from router.requests.prompt_hashes import PromptHashes

_T = TypeVar("_T")

TEST_PREFIX = "test-"
"""Begins the ids of operators' test prompts, which count in no target."""
ReadinessCheck = Callable[[], str | None]
"""Returns None while requests can be served, otherwise the reason why not."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that this router serves.

    `path` is the checkpoint's folder. `context` returns the most tokens that a prompt and its
    output may have together in the current fleet. `created` is in seconds since the Unix epoch.
    Answers carry `name`; clients may also use any of `other_names`.
    """

    name: str
    path: Path
    context: Callable[[], int]
    created: int
    other_names: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names under which the model may be requested; the one that answers carry comes
        first."""
        return (self.name, *self.other_names)

    @property
    def max_context(self) -> int:
        """Prompt plus output tokens that some decode worker currently accepts."""
        return self.context()


class GenerationRequest(msgspec.Struct, frozen=True):
    """One sequence to generate. `deadline_ms` is the time left for the whole request.

    - `life`: 0 at first; grows with every takeover by another router, which may take over a
      resumable request if this router dies. In every life the deltas begin with the first token.
    - `is_open_ended`: the client set no limit for the output. `max_tokens` is then the most that
      some worker could give; an attempt may end earlier, at the end of its worker's context.
    - `hashes`: requests with the same `token_ids` may share them.
    - `only_workers`: if it names workers of a role, the request goes to no other worker of that
      role.
    - `share`: workers give each share equal turns.
    - `session`: requests of one session go to the same workers if that costs no more.
    - `ttft_target_ms`, `tpot_target_ms`: the targets of the client or its key; None: the router's.
      A request that is predicted to miss its own targets because of the load is refused.
    - `shared_tokens`: leading tokens declared as shared by everybody; the blocks that they fill
      have no salt.
    - `stays_in_pool`: workers may keep its KV nowhere but in their pools.
    - `retention`: how long its KV should stay there after the request.
    """

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    priority: int
    deadline_ms: int
    cache_salt: str
    is_resumable: bool = False
    life: int = 0
    is_open_ended: bool = False
    hashes: PromptHashes = msgspec.field(default_factory=PromptHashes)
    only_workers: frozenset[str] = frozenset()
    share: str = ""
    shared_tokens: int = 0
    session: str = ""
    stays_in_pool: bool = False
    retention: RetentionHint | None = None
    ttft_target_ms: float | None = None
    tpot_target_ms: float | None = None


class TokenDelta(msgspec.Struct, frozen=True, gc=False):
    """Tokens that arrived together.

    `logprobs` has one entry per token, or is None if none were requested. `finish` is set on the
    last delta only; a token that stopped the sequence is among `token_ids`. `cached_tokens` counts
    the prompt tokens that were not computed by the attempt that gave the first token.
    `prompt_logprobs` come with the output's first token if they were requested.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None
    cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None

    def split(self, at: int) -> list[TokenDelta]:
        """The first `at` tokens as one delta, then the rest, if any."""
        if len(self.token_ids) < at and self.finish is None:
            return [self]
        first, rest = (None, None) if self.logprobs is None else _halves(self.logprobs, at)
        head, tail = _halves(self.token_ids, at)
        parts = [TokenDelta(head, first, None, self.cached_tokens, self.prompt_logprobs)]
        if tail or self.finish is not None:
            parts.append(TokenDelta(tail, rest, self.finish, self.cached_tokens))
        return parts

    def one_by_one(self) -> list[TokenDelta]:
        """One delta per token. A finish by length gets a delta of its own after the last token,
        because the router may also learn about the limit later."""
        ids, finish = self.token_ids, self.finish
        ends_apart = finish is FinishReason.LENGTH and bool(ids)
        if len(ids) <= 1 and not ends_apart:
            return [self]
        parts = [
            TokenDelta(
                [token_id],
                None if self.logprobs is None else [self.logprobs[place]],
                finish if place == len(ids) - 1 and not ends_apart else None,
                self.cached_tokens,
                None if place else self.prompt_logprobs,
            )
            for place, token_id in enumerate(ids)
        ]
        if ends_apart:
            parts.append(TokenDelta([], None, finish, self.cached_tokens))
        return parts


def _halves(items: list[_T], at: int) -> tuple[list[_T], list[_T]]:
    return items[:at], items[at:]


class ChosenWorkers(msgspec.Struct, frozen=True):
    """Where an attempt ran, and why. `mode` is "local" or "remote"."""

    mode: str
    prefill: str | None
    decode: str
    reason: str


class GenerationTiming(msgspec.Struct, frozen=True):
    """Durations of a generation in ms: of its last attempt, except for `ttft_ms` and `decode_ms`.
    None for phases that did not happen or have not been reported yet."""

    placement: ChosenWorkers | None
    num_attempts: int
    ttft_ms: float | None
    queue_ms: float | None
    prefill_ms: float | None
    handoff_ms: float | None
    decode_ms: float | None


TimingLookup = Callable[[str], GenerationTiming | None]
"""Looks up the timing of a generation by its id; None if its trace is not kept."""


class DeltaSink(Protocol):
    """Receives the deltas of one request as they arrive."""

    @property
    def is_full(self) -> bool:
        """Whether the sink has no room for now because its reader is slow."""
        ...

    async def wait_room(self) -> None:
        """Wait until there is room or the reader is gone."""
        ...

    def take(self, delta: TokenDelta) -> bool:
        """Take a delta at once; returns False if the sink wants no more. Never raises."""
        ...


class Generator(Protocol):
    """Produces the tokens of a request, wherever they are computed."""

    async def generate(self, request: GenerationRequest, sink: DeltaSink) -> list[int]:
        """Give deltas to `sink` until one carries `finish` or the sink wants no more. Returns all
        tokens of the output, of which the sink may not have wanted the last ones.

        While the sink is full, deltas wait here in a bounded queue. Cancellation aborts the
        request on every worker at once. Raises `RequestError` (such as `PromptTooLong`) for the
        caller's mistakes, `Overloaded` when no worker can take the request, `GenerationFailed`
        when the attempts are used up.
        """
        ...
