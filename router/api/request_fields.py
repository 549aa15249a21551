"""The shared parts of request bodies: the generation fields and the strict parsing of all fields.

Types are never coerced, and unknown fields are errors. A field of OpenAI's API that Baton does
not support is refused by name unless its value means "off". Null means absent everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, LiteralString, TypeVar

from fastapi import Request
from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag
from pydantic import ValidationError as PydanticValidationError
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from protocol.errors import InvalidRequest
from protocol.sampling import MAX_LOGPROBS
from router.api.structured_outputs import ResponseFormat, StructuredOutputs
from router.api.unknown_nulls import without_unknown_nulls
from router.http.disconnect import ClientGone, connection_of
from router.http.errors import invalid_request
from router.http.request_scope import record_of
from router.requests.event_ids import body_digest

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKENS = 256
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKENS = 4096
MAX_BAD_STRINGS = 128
GUIDED = "newer vLLM and Baton say this in 'structured_outputs'"
_INT32_MAX = 2**31 - 1
_JSON = "application/json"


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


class StrictModel(BaseModel):
    """Base class of request schemas."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class RequestBody(StrictModel):
    """Base class of whole request bodies."""

    def check_together(self) -> None:
        """Checks constraints between fields. Raises InvalidRequest."""


class StreamOptions(StrictModel):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[Any, only(False)] = None


def _stop_shape(value: Any) -> str:
    return "<text>" if isinstance(value, str) else "<texts>"


_StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_CHARS)]
_Stop = Annotated[
    Annotated[_StopString, Tag("<text>")]
    | Annotated[list[_StopString], Field(max_length=MAX_STOP_STRINGS), Tag("<texts>")],
    Discriminator(_stop_shape),
]


_BadWord = Annotated[str, Field(min_length=1, max_length=100)]
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
            dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_LOGIT_BIASES)
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: _Stop | None = None
    stop_token_ids: (
        Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_STOP_TOKENS)] | None
    ) = None
    allowed_token_ids: (
        Annotated[
            list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=MAX_ALLOWED_TOKENS)
        ]
        | None
    ) = None
    bad_words: Annotated[list[_BadWord], Field(max_length=MAX_BAD_STRINGS)] | None = None
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
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Annotated[Any, only(why=GUIDED)] = None
    guided_regex: Annotated[Any, only(why=GUIDED)] = None
    guided_choice: Annotated[Any, only(why=GUIDED)] = None
    guided_grammar: Annotated[Any, only(why=GUIDED)] = None
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


async def read_fields(request: Request, schema: type[Fields], max_body_bytes: int) -> Fields:
    """Reads and checks a request's body, and stores its digest in the request's record.

    Raises InvalidRequest, HTTPException 413 and 415, and ClientGone if the client disconnects.
    """
    record = record_of(request.scope)
    content_type = record.header(b"content-type")
    media_type = _JSON if content_type is None else content_type.partition(";")[0]
    if media_type != _JSON and media_type.strip().lower() != _JSON:
        raise HTTPException(415, f"the content type must be application/json, not {media_type}")
    body = await _body(request, max_body_bytes)
    record.body_digest = body_digest(body)
    fields = _checked(schema, body)
    fields.check_together()
    return fields


def _checked(schema: type[Fields], body: bytes) -> Fields:
    """Validates the body. Unknown fields that are null are ignored, because clients send answers
    back with all the fields of their own types. Raises InvalidRequest."""
    try:
        return schema.model_validate_json(body)
    except PydanticValidationError as error:
        rest = without_unknown_nulls(body, error)
        if rest is None:
            raise invalid_request(error) from error
    try:
        return schema.model_validate_json(rest)
    except PydanticValidationError as error:
        raise invalid_request(error) from error


async def _body(request: Request, max_bytes: int) -> bytes:
    """The whole body, directly from the connection if it has already arrived there."""
    whole = connection_of(request.scope).try_body(request.scope)
    if whole is not None:
        _check_length(whole, max_bytes)
        return whole
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            _check_length(body, max_bytes)
    except ClientDisconnect as error:
        raise ClientGone from error
    return bytes(body)


def _check_length(body: bytes | bytearray, max_bytes: int) -> None:
    if len(body) > max_bytes:
        raise HTTPException(413, f"the body exceeds {max_bytes} bytes")
