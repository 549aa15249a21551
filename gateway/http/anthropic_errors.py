"""Errors in Anthropic's format, for the paths of Anthropic's API."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response

from http_kit.errors import HttpError
from protocol.errors import InvalidRequest, PromptTooLong

_PREFIX = "/v1/messages"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class UnsupportedThread(Struct, frozen=True):
    """Says that a conversation cannot be stored, to clients that can continue without."""

    error_code: str
    unsupported: list[str]


class AnthropicErrorDetail(Struct, frozen=True):
    """The type and message of an error."""

    type: str
    message: str
    details: UnsupportedThread | UnsetType = UNSET


class AnthropicError(Struct, frozen=True, tag="error"):
    """Every error response under `/v1/messages`; in a stream, the last event."""

    error: AnthropicErrorDetail
    request_id: str | None


class ThreadsUnsupported(InvalidRequest):
    """The client wants its conversation stored here. Anthropic's own client understands this
    error: from then on it sends the whole conversation."""

    code = "thread_unsupported_request"

    def __init__(self) -> None:
        super().__init__("'thread' is not supported: nothing is stored", "thread")


def is_anthropics(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path == _PREFIX or path.startswith(f"{_PREFIX}/")


def error_response(error: HttpError, path: str, request_id: str | None) -> Response:
    """The error response in the format of the API that the path belongs to."""
    if not is_anthropics(path):
        return error.response()
    body = anthropic_error(error, request_id)
    return Response(body, error.status, error.headers, media_type="application/json")


def anthropic_error(error: HttpError, request_id: str | None) -> bytes:
    """The JSON document."""
    kind = "invalid_request_error" if error.status < 500 else "api_error"
    is_about_threads = error.code == ThreadsUnsupported.code
    details = UnsupportedThread(ThreadsUnsupported.code, ["thread"]) if is_about_threads else UNSET
    message = error.message if error.too_long is None else _too_long_message(error.too_long)
    detail = AnthropicErrorDetail(_TYPES.get(error.status, kind), message, details)
    return msgspec.json.encode(AnthropicError(detail, request_id))


def _too_long_message(error: PromptTooLong) -> str:
    """Anthropic's wording, from which clients know whether to shorten the prompt or the output."""
    limit, prompt, output = error.limit, error.prompt, error.output
    if prompt > limit or not output:
        return f"prompt is too long: {prompt} {error.unit} > {limit} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {prompt} + {output} > {limit}, "
        "decrease input length or `max_tokens` and try again"
    )
