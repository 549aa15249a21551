"""All operations of the HTTP API in one table: what each one accepts and returns.

The OpenAPI document is made from this table. A test checks that it matches the served routes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from gateway.api.anthropic.answer import AnthropicEvent, AnthropicMessage, TokenCount
from gateway.api.anthropic.request import CountTokensRequest, MessagesRequest
from gateway.api.openai.answers import ChatChunk, ChatCompletion, Completion, Model, ModelList
from gateway.api.openai.chat_request import ChatRequest
from gateway.api.openai.completion_request import CompletionRequest
from gateway.api.openai_responses.answer import (
    DeletedResponse,
    InputItems,
    InputTokens,
    Response,
    ResponseEvent,
)
from gateway.api.openai_responses.request import InputTokensRequest, ResponsesRequest
from gateway.api.probes import ServiceStatus, ServiceVersion
from gateway.api.tokenize import DetokenizedText, DetokenizeRequest, TokenizeRequest, Tokens
from gateway.http.access import Door
from gateway.http.paths import NOT_SERVED

_BODY_ERRORS = (400, 404, 408, 413, 415, 429, 503)
_GENERATION_ERRORS = (*_BODY_ERRORS, 500, 504)


@dataclass(frozen=True)
class Operation:
    """One method of one path.

    `answer` is the type of the JSON answer, a media type for an answer that is not JSON, or None
    if every answer is an error. `event` is the type of a stream's events. `errors` are the
    possible statuses besides those that any request may return.
    """

    method: str
    path: str
    summary: str
    tag: str
    door: Door
    answer: Any
    body: type[BaseModel] | None = None
    event: Any = None
    errors: tuple[int, ...] = ()


def _probe(path: str, summary: str, answer: Any, *errors: int, method: str = "get") -> Operation:
    return Operation(method, path, summary, "service", Door.OPEN, answer, errors=errors)


def _viewed(path: str, summary: str, *errors: int) -> Operation:
    return Operation("get", path, summary, "operators", Door.ADMIN, dict[str, Any], errors=errors)


_GENERATION = (
    Operation(
        "post", "/v1/chat/completions", "The assistant's next message in a conversation",
        "generation", Door.API, ChatCompletion, ChatRequest, ChatChunk, _GENERATION_ERRORS,
    ),
    Operation(
        "post", "/v1/completions", "Text continued from a prompt",
        "generation", Door.API, Completion, CompletionRequest, Completion, _GENERATION_ERRORS,
    ),
    Operation(
        "post", "/v1/responses", "What the assistant says next, as items",
        "generation", Door.API, Response, ResponsesRequest, ResponseEvent, _GENERATION_ERRORS,
    ),
    Operation(
        "post", "/v1/messages", "Anthropic's: the assistant's next message", "generation",
        Door.API, AnthropicMessage, MessagesRequest, AnthropicEvent, _GENERATION_ERRORS,
    ),
    Operation(
        "post", "/v1/messages/count_tokens", "Anthropic's: how long the prompt would be",
        "tokens", Door.API, TokenCount, CountTokensRequest, errors=_BODY_ERRORS,
    ),
)  # fmt: skip
_RESPONSE_TOKENS = Operation(
    "post", "/v1/responses/input_tokens", "How long the prompt of a response would be",
    "tokens", Door.API, InputTokens, InputTokensRequest, errors=_BODY_ERRORS,
)  # fmt: skip
_KEPT = (
    Operation(
        "get", "/v1/responses/{response_id}",
        "A response that is kept, as it is now, or its events; query: stream, starting_after",
        "generation", Door.API, Response, event=ResponseEvent, errors=(400, 404, 429, 503),
    ),
    Operation(
        "delete", "/v1/responses/{response_id}", "Delete a response that is kept",
        "generation", Door.API, DeletedResponse, errors=(404, 429, 503),
    ),
    Operation(
        "post", "/v1/responses/{response_id}/cancel", "Cancel a response in the background",
        "generation", Door.API, Response, errors=(400, 404, 429, 503),
    ),
    Operation(
        "get", "/v1/responses/{response_id}/input_items",
        "The items before a response's output; query: limit, order, after",
        "generation", Door.API, InputItems, errors=(400, 404, 429, 503),
    ),
)  # fmt: skip
_MODELS = (
    Operation("get", "/v1/models", "The models served here", "models", Door.API, ModelList),
    Operation(
        "get", "/v1/models/{model_id}", "One model, with the length of its context",
        "models", Door.API, Model, errors=(404,),
    ),
)  # fmt: skip
_TOKENS = (
    Operation(
        "post", "/tokenize", "A text or a conversation as token ids",
        "tokens", Door.API, Tokens, TokenizeRequest, errors=_BODY_ERRORS,
    ),
    Operation(
        "post", "/detokenize", "Token ids as text",
        "tokens", Door.API, DetokenizedText, DetokenizeRequest, errors=_BODY_ERRORS,
    ),
)  # fmt: skip
_SERVICE = (
    _probe("/health", "Whether requests can be served", ServiceStatus, 503),
    _probe("/ready", "The same as /health", ServiceStatus, 503),
    _probe("/ping", "The same as /health", ServiceStatus, 503),
    _probe("/ping", "The same as /health", ServiceStatus, 503, method="post"),
    _probe("/live", "Whether the router's process answers", ServiceStatus),
    _probe("/version", "The version of Baton", ServiceVersion),
    _probe("/openapi.json", "This document", dict[str, Any]),
    _probe("/docs", "This document for people", "text/html"),
    Operation("get", "/metrics", "Prometheus metrics", "operators", Door.ADMIN, "text/plain"),
    _viewed("/fleet", "The fleet: workers, pairs, pressure, totals, the last hour"),
    _viewed("/doctor", "What is wrong with the fleet, the evidence, and what to change"),
    _viewed("/doctor/observation", "What the last examination of the fleet looked at", 404),
    _viewed("/cache", "What the prefix caches save, and what other sizes would save"),
    _viewed("/requests", "Running and recent requests; query: order, outcome, limit, prefix", 400),
    _viewed("/requests/{request_id}/trace", "Where one request's time went", 404),
    _viewed(
        "/requests/{request_id}/perfetto", "The spans of that trace as a file for Perfetto", 404
    ),
    _viewed(
        "/flight",
        "The last events of a process; query: process, request_id, since_us, until_us",
        400, 404, 503,
    ),
    Operation(
        "get", "/v1/requests/{request_id}/receipt",
        "Where one's own request went, why, and what happened; for its key and for operators",
        "generation", Door.API, dict[str, Any], errors=(404,),
    ),
)  # fmt: skip
_REFUSED = tuple(
    Operation(
        "post", path, f"Refused: {why}",
        "not served", Door.API, None, errors=(404, 429, 503),
    )
    for path, why in NOT_SERVED.items()
)  # fmt: skip
OPERATIONS = (
    *_GENERATION, _RESPONSE_TOKENS, *_KEPT, *_MODELS, *_TOKENS, *_SERVICE, *_REFUSED,
)  # fmt: skip
