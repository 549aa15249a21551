"""The error tree of Baton.

BatonError
├── ConfigError            an operator's setting is wrong; the message says which and what to do
├── ModelLoadError         a checkpoint cannot be served; names the file, key or tensor
├── ProtocolError          a peer sent an invalid message (corrupt, foreign, wrong version)
│   └── IncompatiblePeer   fingerprints differ; carries both values
├── TransferError          moving KV blocks failed; the attempt fails, never the request
├── RequestError           the caller's fault: becomes a 4xx in OpenAI's format
│   ├── InvalidRequest     400, names the field
│   ├── ModelNotFound      404
│   └── PromptTooLong      413 with both numbers (`context_length_exceeded`)
└── ServiceError           Baton's fault: becomes a 5xx
    ├── Overloaded         503 with Retry-After
    └── GenerationFailed   500, the attempts are used up
"""

from __future__ import annotations


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


class ModelNotFound(RequestError):
    """The model named in the request is not served here."""

    status = 404
    code = "model_not_found"


class PromptTooLong(RequestError):
    """Prompt plus output exceed the context; the message carries both numbers."""

    status = 413
    code = "context_length_exceeded"


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


class GenerationFailed(ServiceError):
    """Every attempt at a request failed; `message` names the request and the last cause."""

    code = "generation_failed"
