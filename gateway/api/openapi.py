"""The OpenAPI 3.1 document of the HTTP API, made from the table of operations.

Request schemas come from the pydantic models that check requests, answer schemas from the structs
that are encoded, so the document cannot differ from the code. It is built once, on the first
request for it; generation requests never pass through this module.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from http import HTTPStatus
from typing import Any

import msgspec
from msgspec import Struct
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway.admission.request_terms import (
    RETENTION_HEADER,
    SESSION_HEADERS,
    TIMEOUT_HEADER,
    TPOT_HEADER,
    TTFT_HEADER,
)
from gateway.api.operations import OPERATIONS, Operation
from gateway.api.replies.timing import TIMING_HEADER
from gateway.http.access import Door
from gateway.http.anthropic_errors import AnthropicError, is_anthropics
from gateway.output.event_ids import HEADER as RESUMING_HEADER
from process.version import baton_version

SESSION_HEADER = SESSION_HEADERS[0]
_REF = "#/components/schemas/{name}"
_PYDANTIC_REF = "#/components/schemas/{model}"
_DESCRIPTION = (
    "OpenAI's, vLLM's and Anthropic's HTTP APIs over a fleet of prefill and decode workers. "
    "Fields that are not listed are ignored and named in the header x-baton-ignored; null means "
    "absent."
)
_SCHEMES = {
    "bearer": {
        "type": "http",
        "scheme": "bearer",
        "description": "A key of the API, or an operator's key for operators' paths. "
        "A router without keys lets everybody in.",
    },
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


class ErrorDetail(Struct, frozen=True):
    """What went wrong. `param` names the faulty field, `code` is machine-readable."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Struct, frozen=True):
    """Every answer that is not a success; in a stream, the last event."""

    error: ErrorDetail


@cache
def openapi_json(root_path: str = "") -> bytes:
    """The document, encoded."""
    return msgspec.json.encode(openapi_document(root_path))


def openapi_document(root_path: str = "") -> dict[str, Any]:
    """The document, as JSON types. Clients see its paths under `root_path`."""
    answers, schemas = _answer_schemas(OPERATIONS)
    bodies, body_schemas = _body_schemas(OPERATIONS)
    clash = schemas.keys() & body_schemas.keys()
    assert not clash, f"two schemas have one name: {clash}"
    paths: dict[str, dict[str, Any]] = {}
    for each in OPERATIONS:
        paths.setdefault(each.path, {})[each.method] = _operation(each, answers, bodies)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": baton_version(), "description": _DESCRIPTION},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": dict(sorted({**schemas, **body_schemas}.items())),
            "securitySchemes": _SCHEMES,
            "headers": _headers(),
            "parameters": _parameters(),
        },
    }


def _answer_schemas(operations: Iterable[Operation]) -> tuple[dict[Any, Any], dict[str, Any]]:
    """Schemas of answers and events by the type's name, since types need not be hashable."""
    named = [each for one in operations for each in (one.answer, one.event)]
    documents = [each for each in named if each is not None and each not in _TEXTS]
    types = [ErrorAnswer, AnthropicError, *documents]
    unique = {str(each): each for each in types}
    found, components = msgspec.json.schema_components(unique.values(), ref_template=_REF)
    return dict(zip(unique, found, strict=True)), components


_TEXTS = ("text/plain", "text/html")
_LIMIT_HEADERS = (
    "x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests",
)  # fmt: skip
_OF_GENERATIONS = (
    TIMING_HEADER, RESUMING_HEADER, TIMEOUT_HEADER, TTFT_HEADER, TPOT_HEADER, SESSION_HEADER,
    RETENTION_HEADER,
)  # fmt: skip
_RARE_HEADERS = ("retry-after", "x-should-retry", "x-baton-receipt", "request-id", *_LIMIT_HEADERS)


def _body_schemas(
    operations: Iterable[Operation],
) -> tuple[dict[type[BaseModel], Any], dict[str, Any]]:
    models = [each.body for each in operations if each.body is not None]
    found, definitions = models_json_schema(
        [(each, "validation") for each in models], ref_template=_PYDANTIC_REF
    )
    components: dict[str, Any] = definitions.get("$defs", {})
    return {each: found[each, "validation"] for each in models}, components


def _operation(each: Operation, answers: dict[Any, Any], bodies: dict[Any, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": each.summary,
        "operationId": _operation_id(each),
        "tags": [each.tag],
        "parameters": [
            *_path_parameters(each.path),
            {"$ref": "#/components/parameters/x-request-id"},
            {"$ref": "#/components/parameters/traceparent"},
            *(
                {"$ref": f"#/components/parameters/{name}"}
                for name in _OF_GENERATIONS
                if each.event
            ),
        ],
        "responses": _responses(each, answers),
        "security": [] if each.door is Door.OPEN else [{name: []} for name in _SCHEMES],
    }
    if each.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": bodies[each.body]}},
        }
    return operation


def _operation_id(each: Operation) -> str:
    return f"{each.method}{each.path}".translate(str.maketrans("/.", "__", "{}"))


def _path_parameters(path: str) -> list[dict[str, Any]]:
    names = [part.strip("{}") for part in path.split("/") if part.startswith("{")]
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ]


def _responses(each: Operation, answers: dict[Any, Any]) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    if each.answer is not None:
        responses["200"] = _answer("The answer", _content(each, answers))
    closed = (401, 403) if each.door is not Door.OPEN else (403,)
    error = {"application/json": {"schema": answers[_error_type(each)]}}
    for status in (*closed, *each.errors):
        responses[str(status)] = _answer(HTTPStatus(status).phrase, error)
        if status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS):
            _add_header(responses[str(status)], "retry-after")
        elif status == HTTPStatus.GATEWAY_TIMEOUT:
            _add_header(responses[str(status)], "x-should-retry")
    if each.event is not None:
        for response in responses.values():
            for name in ("x-baton-receipt", *_LIMIT_HEADERS):
                _add_header(response, name)
    if is_anthropics(each.path):
        for response in responses.values():
            _add_header(response, "request-id")
    return dict(sorted(responses.items()))


def _add_header(response: dict[str, Any], name: str) -> None:
    response["headers"][name] = {"$ref": f"#/components/headers/{name}"}


def _answer(description: str, content: dict[str, Any]) -> dict[str, Any]:
    names = [name for name in _headers() if name not in _RARE_HEADERS]
    headers = {name: {"$ref": f"#/components/headers/{name}"} for name in names}
    return {"description": description, "headers": headers, "content": content}


def _content(each: Operation, answers: dict[Any, Any]) -> dict[str, Any]:
    if each.answer in _TEXTS:
        return {each.answer: {"schema": {"type": "string"}}}
    content = {"application/json": {"schema": answers[str(each.answer)]}}
    if each.event is not None:
        documents = {"anyOf": [answers[str(each.event)], answers[_error_type(each)]]}
        content["text/event-stream"] = {"schema": _event_schema(documents)}
    return content


def _error_type(each: Operation) -> str:
    return str(AnthropicError if each.path.startswith("/v1/messages") else ErrorAnswer)


def _event_schema(documents: dict[str, Any]) -> dict[str, Any]:
    """One server-sent event, as an object of its fields."""
    text = {"type": "string"}
    document = {**text, "contentMediaType": "application/json", "contentSchema": documents}
    data = {"anyOf": [{"const": "[DONE]"}, document]}
    return {
        "type": "object",
        "description": "With `stream`: server-sent events, each with a document as its data; an "
        "error in mid-stream is the last event.",
        "properties": {"data": data, "event": text, "id": text},
        "required": ["data"],
    }


def _headers() -> dict[str, Any]:
    text = {"type": "string"}
    return {
        "x-request-id": {
            "description": "The client's own id of the request if it sent one, else Baton's",
            "schema": text,
        },
        "x-baton-request-id": {"description": "Baton's id of the request", "schema": text},
        "request-id": {"description": "The same for Anthropic's clients", "schema": text},
        "traceparent": {"description": "A span of ours in the client's trace", "schema": text},
        "x-baton-ignored": {
            "description": "The fields of the body that were ignored, if there are any",
            "schema": text,
        },
        "retry-after": {"description": "Seconds to wait", "schema": {"type": "integer"}},
        "x-should-retry": {"description": "false: do not send it again", "schema": text},
        "x-baton-receipt": {
            "description": "Path of the receipt, unless the request was refused at once",
            "schema": text,
        },
        "x-ratelimit-limit-requests": {
            "description": "Sequences that the key may have in flight, if it has a limit",
            "schema": {"type": "integer"},
        },
        "x-ratelimit-remaining-requests": {
            "description": "How many more the key may have now",
            "schema": {"type": "integer"},
        },
        "x-ratelimit-reset-requests": {
            "description": "When one more is likely to have room, as 3s; 0s: now",
            "schema": text,
        },
    }


def _parameters() -> dict[str, Any]:
    def header(name: str, description: str, **schema: Any) -> dict[str, Any]:
        return {
            "name": name,
            "in": "header",
            "description": description,
            "schema": {"type": "string", **schema},
        }

    return {
        "x-request-id": header("x-request-id", "An id of the client's own", maxLength=128),
        "traceparent": header("traceparent", "W3C trace context"),
        RESUMING_HEADER: header(
            RESUMING_HEADER,
            "With `stream`: what follows this event of a stream of the same body",
        ),
        TIMING_HEADER: header(
            TIMING_HEADER, "1 adds `baton`: where the answer's time went", enum=["0", "1"]
        ),
        TIMEOUT_HEADER: header(
            TIMEOUT_HEADER,
            "Milliseconds after which the client no longer waits; the request then ends everywhere",
            pattern="^[0-9]{1,12}$",
        ),
        TTFT_HEADER: header(
            TTFT_HEADER,
            "Target: milliseconds to the first token; a request that would wait longer is refused",
            pattern="^[0-9]{1,12}$",
        ),
        TPOT_HEADER: header(
            TPOT_HEADER, "Target: milliseconds of each later token", pattern="^[0-9]{1,12}$"
        ),
        SESSION_HEADER: header(
            SESSION_HEADER, "The conversation or agent: its requests stay on the same workers"
        ),
        RETENTION_HEADER: header(
            RETENTION_HEADER,
            "Seconds for which the request's KV should stay cached, if there is room; for a "
            "priority from 1 to 100 add ; priority=80",
            pattern="^[0-9]{1,5}( *; *priority=[0-9]{1,3})?$",
        ),
    }
