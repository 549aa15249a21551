"""The seam between the HTTP half of the router and the half that talks to workers.

The API turns one HTTP request into one or more `GenerationRequest`s (prompts x n) and takes
`TokenDelta`s; whoever implements `Generator` decides where a request runs and hides retries.
Nothing here knows HTTP, text or workers. Deltas of one request arrive in order, without gaps or
duplicates, and the last one carries `finish`. They are pushed, the moment a worker's message is
read: a task that is woken for each token would cost more than all that is done with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from protocol.messages import FinishReason
from protocol.sampling import PromptLogprobs, SamplingParams, TokenLogprobs

_T = TypeVar("_T")

ReadinessCheck = Callable[[], str | None]
"""Returns None while requests can be served, otherwise the reason why they cannot."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that this router serves.

    `path` is the checkpoint's folder; `context` tells the tokens that a prompt and its output may
    have together by what the fleet takes now; `created` is in seconds of the Unix epoch.
    """

    name: str
    path: Path
    context: Callable[[], int]
    created: int

    @property
    def max_context(self) -> int:
        """Prompt and output tokens together that every decode worker takes now."""
        return self.context()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate. `deadline_ms` is the time that remains for all of it.

    A resumable one may be taken up by another router if this one dies: `life` is 0,
    and then greater each time. Its deltas begin with the first token in every life.
    """

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    priority: int
    deadline_ms: int
    cache_salt: str
    is_resumable: bool = False
    life: int = 0


class TokenDelta(msgspec.Struct, frozen=True, gc=False):
    """Tokens that became known together.

    `logprobs` has one entry per token, or is None where none were asked for. `finish` is set on
    the last delta only; a token that stopped the sequence is among `token_ids`. `cached_tokens`
    counts the prompt tokens that needed no computing; 0 until known. `prompt_logprobs` come with
    the output's first token, where they were asked for.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None
    cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None

    def split(self, at: int) -> list[TokenDelta]:
        """The first `at` tokens by themselves, then the rest, if anything is left to say."""
        if len(self.token_ids) < at and self.finish is None:
            return [self]
        first, rest = (None, None) if self.logprobs is None else _halves(self.logprobs, at)
        head, tail = _halves(self.token_ids, at)
        parts = [TokenDelta(head, first, None, self.cached_tokens, self.prompt_logprobs)]
        if tail or self.finish is not None:
            parts.append(TokenDelta(tail, rest, self.finish, self.cached_tokens))
        return parts

    def one_by_one(self) -> list[TokenDelta]:
        """Each token by itself. An end by length comes behind the last token, since it may also be
        found out later."""
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


class DeltaSink(Protocol):
    """Where the deltas of one request go as they come."""

    @property
    def is_full(self) -> bool:
        """Whether it takes nothing for now, because its reader is slow."""
        ...

    async def wait_room(self) -> None:
        """Returns when it is not full, or nobody reads any more."""
        ...

    def take(self, delta: TokenDelta) -> bool:
        """Take a delta at once; False if no other one is wanted. Never raises."""
        ...


class Generator(Protocol):
    """Produces the tokens of a request, wherever they are computed."""

    async def generate(self, request: GenerationRequest, sink: DeltaSink) -> None:
        """Give deltas to `sink` until one carries `finish` or it wants no other one.

        While the sink is full they wait here, within bounds. Cancellation aborts everywhere at
        once. Raises `RequestError` (such as `PromptTooLong`) for what the caller did wrong,
        `Overloaded` where no worker can take the request, `GenerationFailed` when the attempts
        are used up.
        """
        ...
