"""The shared parts of request bodies: the generation fields and the strict parsing of all fields.

Types are never coerced. A field that Baton does not know is ignored and named in the answer's
header; so is a known one that it does not honour, unless ignoring it would give the caller
something else than was asked for: then it is refused by name. Null means absent everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, LiteralString, TypeVar

from fastapi import Request
from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic import ValidationError as PydanticValidationError
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from protocol.errors import InvalidRequest
from protocol.sampling import MAX_LOGPROBS
from router.api.context import MAX_INLINE_BYTES, ApiContext
from router.api.strict_model import (
    MAX_VALUES,
    StrictModel,
    check_bounds,
    first_error,
    rough_memory,
)
from router.api.structured_outputs import (
    ANY_TEXT,
    GuidedChoice,
    ResponseFormat,
    StructuredOutputs,
    WantedFormat,
)
from router.api.unknown_fields.findings import Findings, ignorable
from router.api.unknown_fields.ignored import take_ignored
from router.http.disconnect import ClientGone, connection_of
from router.http.errors import invalid_request
from router.http.origin import owner_of
from router.http.request_scope import RequestRecord, record_of
from router.http.variants.content_encoding import decoder_of
from router.output.event_ids import request_digest

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKENS = 256
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKENS = 4096
MAX_BAD_STRINGS = 128
_GUIDED = ("guided_json", "guided_json_object", "guided_regex", "guided_choice", "guided_grammar")
_INT32_MAX = 2**31 - 1
_JSON = b"application/json"
_JSON_TYPES = re.compile(r"application/json|[a-z0-9.\-]+/[a-z0-9.+\-]+\+json")
_MAX_LENGTH_DIGITS = 18


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


class StreamOptions(StrictModel):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[Any, ignorable(False)] = None


def _stop_shape(value: Any) -> str:
    return "<text>" if isinstance(value, str) else "<texts>"


_StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_CHARS)]
_Stop = Annotated[
    Annotated[_StopString, Tag("<text>")]
    | Annotated[list[_StopString], Field(max_length=MAX_STOP_STRINGS), first_error, Tag("<texts>")],
    Discriminator(_stop_shape),
]


_BadWord = Annotated[str, Field(min_length=1, max_length=100)]
CacheSalt = Annotated[str, Field(max_length=256)]
LogprobsCount = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class GenerationFields(RequestBody):
    """How to sample, when to stop and how to answer."""

    model: str
    max_tokens: Annotated[int, Field(ge=0, le=_INT32_MAX)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_INT32_MAX)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_INT32_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_LOGIT_BIASES),
            first_error,
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: _Stop | None = None
    stop_token_ids: (
        Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_STOP_TOKENS), first_error]
        | None
    ) = None
    allowed_token_ids: (
        Annotated[
            list[Annotated[int, Field(ge=0)]],
            Field(min_length=1, max_length=MAX_ALLOWED_TOKENS),
            first_error,
        ]
        | None
    ) = None
    bad_words: Annotated[list[_BadWord], Field(max_length=MAX_BAD_STRINGS), first_error] | None = (
        None
    )
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: LogprobsCount | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=_INT32_MAX)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,128}$")] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    priority: Annotated[int, Field(ge=-_INT32_MAX, le=_INT32_MAX)] | None = None
    cache_salt: CacheSalt | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: GuidedChoice | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    use_beam_search: Annotated[Any, only(False)] = None
    length_penalty: Annotated[Any, only(1, 1.0)] = None

    def check_together(self) -> None:
        """See the base class."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("'stream_options' needs 'stream' to be true", "stream_options")
        if self.counts_every_chunk and not self.wants_usage:
            raise InvalidRequest(
                "'continuous_usage_stats' needs 'include_usage' to be true", "stream_options"
            )
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "'truncate_prompt_tokens' must be at least 1, or -1 for what fits",
                "truncate_prompt_tokens",
            )
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise InvalidRequest(
                "'truncation_side' needs 'truncate_prompt_tokens'", "truncation_side"
            )

    @property
    def format(self) -> WantedFormat:
        """What constrains the output's text."""
        given = self.model_fields_set
        guided = None if given.isdisjoint(_GUIDED) else self._guided()
        if guided is None and self.response_format is None and self.structured_outputs is None:
            return ANY_TEXT
        return WantedFormat(self.response_format, self.structured_outputs, guided)

    def _guided(self) -> StructuredOutputs | None:
        """The older fields as `structured_outputs`, if they have values."""
        values = {name.removeprefix("guided_"): getattr(self, name) for name in _GUIDED}
        given = {name: value for name, value in values.items() if value is not None}
        return StructuredOutputs.model_validate(given) if given else None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, given as one string or as a list."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def counts_every_chunk(self) -> bool:
        """Whether every chunk of a stream reports the usage so far."""
        options = self.stream_options
        return options is not None and bool(options.continuous_usage_stats)

    def answer_id(self, own: str) -> str:
        """The answer's id: made from the caller's id if it gave one, else `own`."""
        return own if self.request_id is None else f"{own.partition('-')[0]}-{self.request_id}"


Fields = TypeVar("Fields", bound=RequestBody)
InTurn = Callable[[Callable[[], Any]], Awaitable[Any]]


async def read_fields(
    request: Request,
    schema: type[Fields],
    max_body_bytes: int,
    in_turn: InTurn,
    refuse_unknown: bool = False,
) -> Fields:
    """Reads and checks a request's body, and stores its digest in the request's record, and the
    names of fields that are ignored.

    A large body is checked by `in_turn`. Its fields count as memory of the request. Raises
    InvalidRequest, HTTPException 413 and 415, Overloaded if the router holds too much memory, and
    ClientGone if the client disconnects.
    """
    record, owner = record_of(request.scope), owner_of(request.scope)
    if record.headers.get(b"content-type") != _JSON:
        _check_media_type(record)
    body = await _body(request, record, max_body_bytes)
    encoding = record.headers.get(b"content-encoding")
    if encoding is not None:
        body = await _decoded(record, body, encoding.decode("latin-1"), max_body_bytes, in_turn)

    def check() -> Fields:
        record.request_digest = request_digest(body, owner)
        fields, record.ignored = fields_of(schema, body, refuse_unknown)
        return fields

    if len(body) <= MAX_INLINE_BYTES:
        record.hold(rough_memory(body))
        return check()
    record.hold(await in_turn(lambda: check_bounds(body, schema.max_values)))
    fields: Fields = await in_turn(check)
    return fields


async def read_body(request: Request, context: ApiContext, schema: type[Fields]) -> Fields:
    """`read_fields` with the settings of an application."""
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
    if content_type is None:
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
        raise invalid_request(error) from error
    ignored = take_ignored(fields, refuse_unknown) if findings.any else ()
    fields.check_together()
    return fields, ignored


async def _decoded(
    record: RequestRecord, body: bytes, encoding: str, max_bytes: int, in_turn: InTurn
) -> bytes:
    """The body without its encoding, in a thread. Raises HTTPException 400, 413 and 415."""
    decode = decoder_of(encoding)
    if decode is None:
        return body
    decoded: bytes = await in_turn(lambda: decode(body, max_bytes))
    record.take_body(len(decoded))
    return decoded


async def _body(request: Request, record: RequestRecord, max_bytes: int) -> bytes:
    """The whole body, directly from the connection if it has already arrived there. If its length
    is known and there is no room for it, none of it is awaited."""
    whole = connection_of(request.scope).try_body(request.scope)
    if whole is not None:
        _check_length(len(whole), max_bytes)
        record.take_body(len(whole))
        return whole
    length = record.header(b"content-length")
    if length is not None and length.isdecimal():
        _check_length(int(length[:_MAX_LENGTH_DIGITS]), max_bytes)
        record.budget.check(int(length[:_MAX_LENGTH_DIGITS]))
    body = bytearray()
    try:
        async for part in request.stream():
            _check_length(len(body) + len(part), max_bytes)
            record.take_body(len(part))
            body += part
    except ClientDisconnect as error:
        raise ClientGone from error
    return bytes(body)


def _check_length(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise HTTPException(413, f"the body exceeds {max_bytes} bytes")
