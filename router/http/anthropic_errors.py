"""Errors in Anthropic's shape, for the paths that its clients ask."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response

from protocol.errors import InvalidRequest
from router.http.errors import HttpError

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
    """That a conversation cannot be kept, for clients that go on without."""

    error_code: str
    unsupported: list[str]


class AnthropicErrorDetail(Struct, frozen=True):
    """What went wrong."""

    type: str
    message: str
    details: UnsupportedThread | UnsetType = UNSET


class AnthropicError(Struct, frozen=True, tag="error"):
    """Every answer under `/v1/messages` that is not a success; in a stream, the last event."""

    error: AnthropicErrorDetail
    request_id: str | None


class ThreadsUnsupported(InvalidRequest):
    """The client wants its conversation kept here. It is told so in a way that Anthropic's own
    understands: from then on that sends all of it."""

    code = "thread_unsupported_request"

    def __init__(self) -> None:
        super().__init__("'thread' is not supported: nothing is stored", "thread")


def is_anthropics(path: str) -> bool:
    """Whether a path is of Anthropic's API."""
    return path == _PREFIX or path.startswith(f"{_PREFIX}/")


def error_response(error: HttpError, path: str, request_id: str | None) -> Response:
    """The answer in the shape of whose API the path belongs to."""
    if not is_anthropics(path):
        return error.response()
    body = anthropic_error(error, request_id)
    return Response(body, error.status, error.headers, media_type="application/json")


def anthropic_error(error: HttpError, request_id: str | None) -> bytes:
    """The JSON document."""
    kind = "invalid_request_error" if error.status < 500 else "api_error"
    is_about_threads = error.code == ThreadsUnsupported.code
    details = UnsupportedThread(ThreadsUnsupported.code, ["thread"]) if is_about_threads else UNSET
    detail = AnthropicErrorDetail(_TYPES.get(error.status, kind), error.message, details)
    return msgspec.json.encode(AnthropicError(detail, request_id))
