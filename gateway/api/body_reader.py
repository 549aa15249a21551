"""Reads and checks the body of a request.

Types are never coerced, but `16.0` is an integer. A field that Baton does not know is ignored and
named in the answer's header. A known field that Baton does not support is treated in the same way,
but if ignoring it would change the answer, the request is refused with the field's name. Null means
absent everywhere.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, LiteralString, TypeVar

from fastapi import Request
from pydantic import AfterValidator
from pydantic import ValidationError as PydanticValidationError
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from gateway.api.context import MAX_INLINE_BYTES, ApiContext
from gateway.api.strict_model import MAX_VALUES, StrictModel, check_bounds, rough_memory
from gateway.api.surrogate_halves import without_half_pairs
from gateway.api.unknown_fields.ignorable_fields import Findings
from gateway.api.unknown_fields.ignored import take_ignored
from gateway.http.request_scope import RequestRecord, record_of
from gateway.http.variants.content_encoding import decoder_of
from gateway.output.event_ids import request_digest
from http_kit.caller import owner_of
from http_kit.disconnect import ClientGone, connection_of
from http_kit.errors import invalid_request
from protocol.errors import InvalidRequest

_JSON = b"application/json"
_JSON_TYPES = re.compile(r"application/json|[a-z0-9.\-]+/[a-z0-9.+\-]+\+json")
_MAX_LENGTH_DIGITS = 18
_POINTED = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|(-?[0-9]+)\.0+(?![0-9eE])')
"""A string, or a whole number with a point: JSON has one kind of number, and libraries that know
only floats write `16.0`."""


@dataclass(frozen=True)
class Only(AfterValidator):
    """See `only`."""

    neutral: tuple[Any, ...]
    why: str

    def __get_pydantic_json_schema__(self, *_: Any) -> dict[str, Any]:
        return {"enum": [None, *self.neutral], "description": f"Anything else: {self.why}."}


def only(*neutral: Any, why: LiteralString = "this is not supported") -> Only:
    """An unsupported field: null and the `neutral` values pass, all others are refused."""

    def check(value: Any) -> Any:
        if value is None or any(type(value) is type(each) and value == each for each in neutral):
            return value
        raise PydanticCustomError("unsupported", why)

    return Only(check, neutral, why)


Unsupported = Annotated[Any, only()]


class RequestBody(StrictModel):
    """Base class of whole request bodies, which may hold `max_values` values."""

    max_values: ClassVar[int] = MAX_VALUES

    def check_together(self) -> None:
        """Checks constraints between fields. Raises InvalidRequest."""


Fields = TypeVar("Fields", bound=RequestBody)
InTurn = Callable[[Callable[[], Any], int], Awaitable[Any]]
"""Runs the given work when its turn comes. The number is the bytes that the work handles. See
`Tokenizer.in_turn`."""


async def read_fields(
    request: Request,
    schema: type[Fields],
    max_body_bytes: int,
    in_turn: InTurn,
    refuse_unknown: bool = False,
) -> Fields:
    """Reads and checks a request's body. Stores in the record the names of ignored fields, and
    the digest of a body that asks for a stream.

    A large body is checked by `in_turn`. Its fields count as memory of the request. Raises
    InvalidRequest, HTTPException 413 and 415, Overloaded if the router holds too much memory, and
    ClientGone if the client disconnects.
    """
    record = record_of(request.scope)
    if record.headers.get(b"content-type") != _JSON:
        _check_media_type(record)
    body = await _body(request, record, max_body_bytes)
    encoding = record.headers.get(b"content-encoding")
    if encoding is not None:
        body = await _decoded(record, body, encoding.decode("latin-1"), max_body_bytes, in_turn)

    if len(body) <= MAX_INLINE_BYTES:
        record.hold(rough_memory(body))
        return _checked(request, record, schema, body, refuse_unknown)
    record.hold(await in_turn(lambda: check_bounds(body, schema.max_values), len(body)))
    check = partial(_checked, request, record, schema, body, refuse_unknown)
    fields: Fields = await in_turn(check, len(body))
    return fields


def _checked(
    request: Request,
    record: RequestRecord,
    schema: type[Fields],
    body: bytes,
    refuse_unknown: bool,
) -> Fields:
    fields, record.ignored = fields_of(schema, body, refuse_unknown)
    if getattr(fields, "stream", False):
        record.request_digest = request_digest(body, owner_of(request.scope))
    return fields


async def read_body(request: Request, context: ApiContext, schema: type[Fields]) -> Fields:
    """Like `read_fields`, with the limits and the tokenizer of `context`. Counts ignored fields."""
    limits = context.limits
    fields = await read_fields(
        request, schema, limits.max_body_bytes, context.tokenizer.in_turn, limits.refuse_unknown
    )
    ignored = record_of(request.scope).ignored
    if ignored:
        context.metrics.ignored_fields.inc(len(ignored))
    return fields


def _check_media_type(record: RequestRecord) -> None:
    """Accepts `application/json` and types that end in `+json`, with parameters. A web page can
    send other types, or none, to any site without asking. Raises HTTPException 415."""
    content_type = record.header(b"content-type")
    if not content_type:
        has_body = record.header(b"content-length") not in (None, "0")
        if has_body or record.header(b"transfer-encoding") is not None:
            raise HTTPException(415, "a content-type is missing: send application/json")
        return
    media_type = content_type.partition(";")[0].strip().lower()
    if _JSON_TYPES.fullmatch(media_type) is None:
        raise HTTPException(415, f"the content type must be application/json, not {media_type}")


def fields_of(
    schema: type[Fields], body: bytes, refuse_unknown: bool
) -> tuple[Fields, Sequence[str]]:
    """The validated body, and the names of ignored fields. Raises InvalidRequest."""
    findings = Findings()
    try:
        fields = schema.model_validate_json(body, context=findings)
    except PydanticValidationError as error:
        if body.startswith(BOM_UTF8):
            return fields_of(schema, body.removeprefix(BOM_UTF8), refuse_unknown)
        if b"\0" in body[:4] or body.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
            raise InvalidRequest("the body is not in UTF-8, but in UTF-16 or UTF-32") from error
        kinds = _kinds_of(error)
        if kinds[0] == "json_invalid" and (whole := without_half_pairs(body)) != body:
            return fields_of(schema, whole, refuse_unknown)
        if "int_type" in kinds and (whole := _without_points(body)) != body:
            return fields_of(schema, whole, refuse_unknown)
        raise invalid_request(error) from error
    ignored = take_ignored(fields, refuse_unknown) if findings.any else ()
    fields.check_together()
    return fields, ignored


def _kinds_of(error: PydanticValidationError) -> list[str]:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return [each["type"] for each in found]


def _without_points(body: bytes) -> bytes:
    """The JSON text with whole numbers written as integers; strings stay as they are."""
    return _POINTED.sub(lambda found: found[1] or found[0], body)


async def _decoded(
    record: RequestRecord, body: bytes, encoding: str, max_bytes: int, in_turn: InTurn
) -> bytes:
    """The decoded body; a thread decodes it. Raises HTTPException 400, 413 and 415."""
    decode = decoder_of(encoding)
    if decode is None:
        return body
    decoded: bytes = await in_turn(lambda: decode(body, max_bytes), len(body))
    record.take_body(len(decoded))
    return decoded


async def _body(request: Request, record: RequestRecord, max_bytes: int) -> bytes:
    """The whole body, directly from the connection if it has already arrived there. If its length
    is known and exceeds the budget, the body is refused before it is awaited."""
    whole = connection_of(request.scope).try_body(request.scope)
    if whole is not None:
        _check_length(len(whole), max_bytes)
        record.take_body(len(whole))
        record.enter_gate()
        return whole
    length = record.header(b"content-length")
    if length is not None and length.isdecimal():
        _check_length(int(length[:_MAX_LENGTH_DIGITS]), max_bytes)
        record.check_room(int(length[:_MAX_LENGTH_DIGITS]))
    body = bytearray()
    try:
        async for part in request.stream():
            _check_length(len(body) + len(part), max_bytes)
            body += part
    except ClientDisconnect as error:
        raise ClientGone from error
    return bytes(body)


def _check_length(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise HTTPException(413, f"the body exceeds {max_bytes} bytes")
