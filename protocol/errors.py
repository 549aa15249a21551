"""The error tree of Baton.

BatonError
├── ConfigError            an operator's setting is wrong; the message says which and what to do
├── ModelLoadError         a checkpoint cannot be served; names the file, key or tensor
├── ProtocolError          a peer sent an invalid message (corrupt, foreign, wrong version)
│   └── IncompatiblePeer   fingerprints differ; carries both values
├── TransferError          moving KV blocks failed; the attempt fails, never the request
│   └── PoolMismatch       a peer named blocks or a pool that do not fit; connecting does not help
├── RequestError           the caller's fault: becomes a 4xx in OpenAI's format
│   ├── InvalidRequest     400, names the field
│   ├── UnusableConstraint 400, the request's grammar or masks end its output; `code` says why
│   ├── ModelNotFound      404
│   ├── ResponseNotFound   404, no response of this id is kept for this key
│   ├── PreviousNotFound   400, the response that a request continues is not kept
│   ├── ItemNotFound       404, an item that a request refers to is not kept
│   ├── TooManyRequests    429, the key has as many requests in flight as it may
│   └── PromptTooLong      400 with the numbers (`context_length_exceeded`)
└── ServiceError           Baton's fault: becomes a 5xx
    ├── Overloaded         503 with Retry-After
    │   ├── DeadlineUnreachable 503, the request would wait for longer than its time
    │   ├── TargetUnreachable  503, the load would make it miss its targets
    │   └── StoreTrouble       503, the request needs the store of responses
    │       ├── StoreAway      the store cannot be reached
    │       ├── StoreFull      the store has no room
    │       └── StoreRefused   the store answers with an error
    └── GenerationFailed   500, the attempts are used up
        └── DeadlineExceeded 504, the request's time is over
"""

from __future__ import annotations

import math
from typing import Literal

MAX_RETRY_S = 59
"""The longest Retry-After. Some clients ignore 60 s and more (Vercel's AI SDK) or more than 60 s
(LiteLLM), and then come back within seconds."""


def retry_after(wait_s: float) -> int:
    """The Retry-After, in whole seconds, for a wait of about `wait_s`."""
    return max(1, min(MAX_RETRY_S, math.ceil(wait_s)))


class BatonError(Exception):
    """Base of every error that Baton raises on purpose."""


class ConfigError(BatonError):
    """A setting is missing, unknown or malformed; one line that says what to do."""


class ModelLoadError(BatonError):
    """A checkpoint cannot be served; the message names the problem and what is supported."""


class ProtocolError(BatonError):
    """A frame or message from a peer is invalid."""


class IncompatiblePeer(ProtocolError):
    """A peer's fingerprint differs from ours."""

    def __init__(self, what: str, ours: str, theirs: str) -> None:
        super().__init__(f"{what} differs: ours is {ours}, the peer's is {theirs}")
        self.what = what
        self.ours = ours
        self.theirs = theirs


class TransferError(BatonError):
    """KV blocks could not be moved; fails the attempt that they belong to."""


class PoolMismatch(TransferError):
    """A peer's descriptor or the blocks that it granted do not fit; its connection is not to
    blame."""


class RequestError(BatonError):
    """The caller's fault. `status`, `kind` and `code` go into the HTTP response."""

    status = 400
    kind = "invalid_request_error"
    code: str | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(RequestError):
    """A field has a value that cannot be honoured; `param` names the field."""


GRAMMAR_FAILED = "grammar_failed"
"""The grammar exceeds a limit, or cannot be compiled by a worker."""
GRAMMAR_TOO_SLOW = "grammar_too_slow"
"""The grammar's masks take too long to compute."""
NO_TOKEN_ALLOWED = "no_token_allowed"
"""The grammar and the other masks together leave no token."""


class UnusableConstraint(RequestError):
    """The request's constraints on its output let no worker finish it; `code` is one of those
    above. Some of the output may have been sent."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class ModelNotFound(RequestError):
    """The model named in the request is not served here."""

    status = 404
    code = "model_not_found"


class ResponseNotFound(RequestError):
    """No response of this id is kept for the caller's key."""

    status = 404
    code = "response_not_found"

    def __init__(self, response_id: str, reason: str = "") -> None:
        super().__init__(f"Response with id '{response_id}' not found.{reason and ' '}{reason}")


class PreviousNotFound(RequestError):
    """The response that a request continues is not kept; clients know OpenAI's wording and code."""

    code = "previous_response_not_found"

    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"Previous response with id '{response_id}' not found.", "previous_response_id"
        )


class ItemNotFound(RequestError):
    """An item to which a request refers is not kept; clients know OpenAI's wording."""

    status = 404

    def __init__(self, item_id: str) -> None:
        super().__init__(
            f"Item with id '{item_id}' not found. Items are not persisted when `store` is set to "
            "false. Try again with `store` set to true, or send the item itself.",
            "input",
        )


class PromptTooLong(RequestError):
    """Prompt plus output exceed the context. The message has OpenAI's wording, from which clients
    know that they have to shorten the conversation; LangChain looks for the code in the message.

    `prompt` and `output` are lengths in `unit`; with `is_least` the prompt may be longer. `reason`
    is a sentence about what sets the limit, if that is not the model.
    """

    code = "context_length_exceeded"

    def __init__(  # noqa: PLR0913 - all but three are keywords
        self,
        limit: int,
        prompt: int,
        output: int = 0,
        param: str | None = None,
        *,
        unit: Literal["tokens", "bytes"] = "tokens",
        is_least: bool = False,
        reason: str = "",
    ) -> None:
        what, least = param or "prompt", "at least " if is_least else ""
        parts = f" in the {what}"
        if output:
            parts = f" ({least}{prompt} in the {what}, {output} in the completion)"
        super().__init__(
            f"This model's maximum context length is {limit} {unit}. However, you requested "
            f"{least}{prompt + output} {unit}{parts}. Please reduce the length of the {what}"
            f"{' or completion' if output else ''}.{reason and ' '}{reason} ({self.code})",
            param,
        )
        self.limit = limit
        self.prompt = prompt
        self.output = output
        self.unit = unit


class TooManyRequests(RequestError):
    """The key has reached its own limit; `retry_after_s` goes into Retry-After."""

    status = 429
    kind = "requests"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ServiceError(BatonError):
    """Baton's fault. `status` and `kind` go into the HTTP response."""

    status = 500
    kind = "server_error"
    code: str | None = None

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Overloaded(ServiceError):
    """No worker can take the request now; `retry_after_s` goes into Retry-After."""

    status = 503
    kind = "service_unavailable"
    code = "overloaded"

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineUnreachable(Overloaded):
    """The prompts ahead of the request take longer than its remaining time."""

    code = "deadline_unreachable"


class TargetUnreachable(Overloaded):
    """The request is predicted to miss its own targets because of the load."""

    code = "target_unreachable"


class StoreTrouble(Overloaded):
    """The store of responses fails a call that the request needs. `reason` is a metric's label."""

    reason = "store_refused"


class StoreAway(StoreTrouble):
    """The store of responses cannot be reached, and the request needs it."""

    code = "store_unavailable"
    reason = "store_away"

    def __init__(self) -> None:
        super().__init__(
            "the store that keeps responses cannot be reached; try again, or send the whole "
            "conversation as 'input', without 'previous_response_id' and 'background'"
        )


class StoreFull(StoreTrouble):
    """The store of responses has no room, and nothing of ours that could be dropped."""

    code = "store_full"
    reason = "store_full"

    def __init__(self) -> None:
        super().__init__(
            "the store that keeps responses is full; try again later, or without 'background'"
        )


class StoreRefused(StoreTrouble):
    """The store of responses answers a call with an error."""

    code = "store_refused"

    def __init__(self) -> None:
        super().__init__(
            "the store that keeps responses refuses the call; the router's log has its words"
        )


class GenerationFailed(ServiceError):
    """Every attempt at a request failed; `message` names the request and the last cause."""

    code = "generation_failed"


class DeadlineExceeded(GenerationFailed):
    """The request was not finished within the time that its client, or the service, allows."""

    status = 504
    code = "deadline_exceeded"
