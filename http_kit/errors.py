"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}`.

The only place where an exception becomes a status and a body. An unexpected error is logged in
full under the request's id, and the client gets only that id.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import msgspec
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.responses import Response

from protocol.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    RequestError,
    ServiceError,
    TooManyRequests,
)

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 1000
MAX_PARAM_CHARS = 200
_PATHS = {
    "messages": "/v1/chat/completions",
    "input": "/v1/responses",
    "prompt": "/v1/completions",
}
"""The fields that hold the client's question."""
_NO_RETRY = {"x-should-retry": "false"}
"""OpenAI's and Anthropic's clients retry a 504 unless an answer says this."""
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 415: "unsupported_media_type"}


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error response. `too_long` is the cause if a prompt was too long, which Anthropic's API
    words differently."""

    status: int
    message: str
    kind: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    too_long: PromptTooLong | None = None

    def body(self) -> bytes:
        """The JSON document."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        """The HTTP response."""
        return Response(self.body(), self.status, self.headers, media_type="application/json")


def describe(error: Exception, request_id: str) -> HttpError:
    """The error response for an exception. Logs errors that are the service's fault."""
    if isinstance(error, RequestError):
        message, param = shortened(error.message, MAX_MESSAGE_CHARS), error.param
        if param is not None:
            param = shortened(param, MAX_PARAM_CHARS)
        too_long = error if isinstance(error, PromptTooLong) else None
        headers = {}
        if isinstance(error, TooManyRequests):
            headers = {"retry-after": str(error.retry_after_s)}
        return HttpError(
            error.status, message, error.kind, param, error.code, headers, too_long=too_long
        )
    if isinstance(error, HTTPException):
        code = _HTTP_CODES.get(error.status_code)
        headers = dict(error.headers or {})
        kind = RequestError.kind
        message = shortened(str(error.detail), MAX_MESSAGE_CHARS)
        return HttpError(error.status_code, message, kind, None, code, headers)
    if isinstance(error, Overloaded):
        headers = {"retry-after": str(error.retry_after_s)}
        return HttpError(error.status, error.message, error.kind, None, error.code, headers)
    if isinstance(error, ServiceError):
        logger.error("request %s failed: %s", request_id, error.message)
        message = error.message
        if request_id not in message:
            message = f"{message} (request {request_id})"
        headers = _NO_RETRY if isinstance(error, DeadlineExceeded) else {}
        return HttpError(error.status, message, error.kind, None, error.code, headers)
    logger.error("request %s failed unexpectedly", request_id, exc_info=error)
    message = f"internal error; its cause is in the router's log under request {request_id}"
    return HttpError(ServiceError.status, message, ServiceError.kind, None, "internal_error")


def shortened(text: str, most: int) -> str:
    """A text with its middle left out if it exceeds `most` characters: errors quote clients."""
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


def invalid_request(error: ValidationError) -> InvalidRequest:
    """The first error of a failed validation, with a message that names the field."""
    first = error.errors(include_url=False, include_input=False)[0]
    param = _field_path(first)
    message = _message(first, param)
    if first["type"] == "missing" and param in _PATHS:
        message += _hint(error.errors(include_url=False)[0]["input"])
    return InvalidRequest(message, param)


def _hint(body: Any) -> str:
    """The path that a body without the required field was probably meant for."""
    for name, path in _PATHS.items():
        if isinstance(body, dict) and name in body:
            return f"; {name!r} is a field of {path}"
    return ""


def _message(details: ErrorDetails, param: str | None) -> str:
    kind = details["type"]
    if kind == "json_invalid":
        return f"the body is not valid JSON: {details['ctx']['error']}"
    if param is None:
        return "the body must be a JSON object" if kind == "model_type" else details["msg"]
    if kind == "missing":
        return f"'{param}' is required"
    if kind == "unknown_field":
        return f"'{param}' is not a known field"
    text = details["msg"].replace(" after validation", "")
    return f"'{param}': {text[:1].lower()}{text[1:]}"


def _field_path(details: ErrorDetails) -> str | None:
    """The path of a field, such as `messages[1].content`. Parts in angle brackets name branches of
    unions, not fields. A last part in square brackets says that the name of a field is wrong, not
    its value."""
    path = ""
    places = details["loc"]
    for part in places[:-1] if places[-1:] == ("[key]",) else places:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("<"):
            path += f".{part}" if path else part
    return path or None
