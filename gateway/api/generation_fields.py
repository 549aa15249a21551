"""The fields of requests that generate: those of every API, and those of OpenAI's older APIs.

What other servers call a limit, a stop or a constraint is a field here too, so that it is never
dropped. Types are never coerced, and null means absent.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, PrivateAttr
from pydantic_core import PydanticCustomError

from gateway.api.body_reader import RequestBody, only
from gateway.api.constraints.constraint import Constraint, ConstraintKind
from gateway.api.constraints.constraint_fields import (
    GrammarOrFormat,
    GuidedChoice,
    ObjectOrText,
    ResponseFormat,
    SchemaValue,
    StructuredOutputs,
    schema_constraints,
)
from gateway.api.strict_model import StrictModel, first_error
from gateway.api.union_branches import LIST, OBJECT, TEXT, TEXT_OR_LIST, by_shape
from gateway.api.unknown_fields.ignorable_fields import ignorable
from protocol.errors import InvalidRequest
from protocol.retention import MAX_PRIORITY, MAX_SECONDS, USUAL_PRIORITY, RetentionHint
from protocol.sampling import MAX_LOGPROBS, MIN_REPETITION_PENALTY

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKENS = 256
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKENS = 4096
MAX_BAD_STRINGS = 128
_GUIDED = ("guided_json", "guided_json_object", "guided_regex", "guided_choice", "guided_grammar")
_CONSTRAINING = frozenset(
    (
        "response_format", "structured_outputs", "format", "json_schema", "regex", "grammar",
        "ebnf", "structural_tag", *_GUIDED,
    )
)  # fmt: skip
_LIMITS = (
    "max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "n_predict",
    "num_predict",
)  # fmt: skip
_LIMIT_NAMES = frozenset(_LIMITS)
_INT32_MAX = 2**31 - 1


class StreamOptions(StrictModel):
    """Options for what a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[Any, ignorable(False)] = None


_StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_CHARS)]
_StopStrings = Annotated[list[_StopString], Field(max_length=MAX_STOP_STRINGS), first_error]
_Stop = Annotated[
    Annotated[_StopString, TEXT] | Annotated[_StopStrings, LIST],
    TEXT_OR_LIST,
]


def _nonzero(limit: int) -> int:
    if limit == 0:
        raise PydanticCustomError("zero", "Input should be at least 1, or -1 for no limit")
    return limit


_OllamaFormat = Annotated[
    Annotated[Literal["", "text", "json"], TEXT] | Annotated[dict[str, Any], OBJECT],
    by_shape(str, dict),
]
_BadWord = Annotated[str, Field(min_length=1, max_length=100)]
_Limit = Annotated[int, Field(ge=1, le=_INT32_MAX)]
_LimitOrNone = Annotated[
    int,
    Field(ge=-2, le=_INT32_MAX, description="The limit of the output; a negative number is none."),
    AfterValidator(_nonzero),
]
_OtherLimit = Annotated[_Limit, Field(description="Another name of the limit of the output.")]
_OtherConstraint = Field(description="Another server's name for a part of `structured_outputs`.")
_Count = Annotated[int, Field(ge=0, le=_INT32_MAX)]
CacheLifetime = Annotated[
    Any, Field(description='"24h" keeps the prompt cached for longer. Other values change nothing.')
]
CacheSalt = Annotated[str, Field(max_length=256)]
LogprobsCount = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


LIFETIMES_S = {"5m": 300, "1h": 3600, "24h": 3600}
"""The longest time for which KV is protected at the request of another API's client. An hour is a
long time in memory: blocks that no request uses again would keep out the blocks of others."""


class CacheRetention(StrictModel):
    """How long the request's KV should stay cached after it, if there is room."""

    seconds: Annotated[int, Field(ge=1, le=MAX_SECONDS)]
    priority: Annotated[int, Field(ge=1, le=MAX_PRIORITY)] | None = None

    @property
    def hint(self) -> RetentionHint:
        """The hint for workers."""
        return RetentionHint(self.seconds, self.priority or USUAL_PRIORITY)


class SamplingFields(RequestBody):
    """How to sample, which texts are allowed and when to stop: the same in every API."""

    constrains: ClassVar[bool] = True

    max_tokens: _LimitOrNone | None = None
    max_completion_tokens: _LimitOrNone | None = None
    max_output_tokens: _Limit | None = None
    max_new_tokens: _OtherLimit | None = None
    n_predict: _LimitOrNone | None = None
    num_predict: _LimitOrNone | None = None
    min_tokens: _Count | None = None
    min_new_tokens: _Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_INT32_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=10)] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_LOGIT_BIASES),
            first_error,
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: _Stop | None = None
    stop_sequences: _StopStrings | None = None
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
    priority: Annotated[int, Field(ge=-_INT32_MAX, le=_INT32_MAX)] | None = None
    cache_salt: CacheSalt | None = None
    cache_retention: CacheRetention | None = None
    session_id: Annotated[str, Field(max_length=512)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaValue | None = None
    guided_regex: str | None = None
    guided_choice: GuidedChoice | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    format: Annotated[_OllamaFormat | None, _OtherConstraint] = None
    json_schema: Annotated[SchemaValue | None, _OtherConstraint] = None
    regex: Annotated[str | None, _OtherConstraint] = None
    grammar: Annotated[GrammarOrFormat | None, _OtherConstraint] = None
    ebnf: Annotated[str | None, _OtherConstraint] = None
    structural_tag: Annotated[ObjectOrText | None, _OtherConstraint] = None

    @property
    def lifetime_s(self) -> int | None:
        """How long the prompt should stay cached, in seconds, by the fields of the client's API;
        None if they do not say. `cache_retention` is Baton's own field."""
        return None

    @property
    def session_name(self) -> str | None:
        """The client's name for the conversation; None if no field names it."""
        return self.session_id

    def check_together(self) -> None:
        """See the base class."""
        super().check_together()
        if len(self.model_fields_set & _LIMIT_NAMES) > 1:
            self._check_limits()

    @property
    def output_limit(self) -> int | None:
        """The limit on generated tokens, under any of its names."""
        for name in self.model_fields_set & _LIMIT_NAMES:
            limit: int | None = getattr(self, name)
            if limit is not None and limit >= 0:
                return limit
        return None

    @property
    def least_tokens(self) -> int:
        """The least number of tokens before the output may end."""
        return max(self.min_tokens or 0, self.min_new_tokens or 0)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, given as one string or as a list."""
        if self.stop is None and self.stop_sequences is None:
            return ()
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        return (*stops, *(self.stop_sequences or ()))

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        """The constraints on the output's text. Raises InvalidRequest for a field without a
        constraint."""
        if self.model_fields_set.isdisjoint(_CONSTRAINING):
            return ()
        found = [*self._structured(), *self._other_servers_constraints()]
        if self.response_format is not None:
            found = [*self.response_format.constraints("response_format"), *found]
        return tuple(found)

    def _check_limits(self) -> None:
        """Raises InvalidRequest if two of the limits differ. Null and negative values set no
        limit."""
        values = ((name, getattr(self, name)) for name in _LIMITS)
        limits = {name: value for name, value in values if value is not None and value >= 0}
        if len(set(limits.values())) > 1:
            first, second, *_ = limits
            raise InvalidRequest(f"'{first}' and '{second}' differ; give one of them", first)

    def _structured(self) -> list[Constraint]:
        """The constraints from `structured_outputs` and from older vLLM's names for its parts."""
        found: list[Constraint] = []
        if self.structured_outputs is not None:
            found += self.structured_outputs.constraints("structured_outputs.")
            if not found:
                raise InvalidRequest(
                    "'structured_outputs' needs one of json, json_object, regex, choice, grammar "
                    "and structural_tag",
                    "structured_outputs",
                )
        values = {name.removeprefix("guided_"): getattr(self, name) for name in _GUIDED}
        given = {name: value for name, value in values.items() if value is not None}
        if given:
            found += StructuredOutputs.model_validate(given).constraints("guided_")
        return found

    def _other_servers_constraints(self) -> list[Constraint]:
        """The constraints from fields of llama.cpp, SGLang, TGI and Ollama. An empty text sets
        none."""
        found: list[Constraint] = []
        if self.format == "json":
            found.append(Constraint("format", ConstraintKind.OBJECT))
        elif isinstance(self.format, dict):
            found += schema_constraints("format", self.format)
        found += schema_constraints("json_schema", self.json_schema)
        if self.grammar and not isinstance(self.grammar, str):
            found += self.grammar.constraints("grammar")
        for name, kind in (
            ("regex", ConstraintKind.REGEX),
            ("grammar", ConstraintKind.GRAMMAR),
            ("ebnf", ConstraintKind.GRAMMAR),
            ("structural_tag", ConstraintKind.STRUCTURAL_TAG),
        ):
            value = getattr(self, name)
            if value and (isinstance(value, str) or name == "structural_tag"):
                found.append(Constraint(name, kind, value))
        return found


class GenerationFields(SamplingFields):
    """How to sample, when to stop and how to answer."""

    model: str
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
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
    use_beam_search: Annotated[Any, only(False)] = None
    length_penalty: Annotated[Any, only(1, 1.0)] = None

    def check_together(self) -> None:
        """See the base class."""
        super().check_together()
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


def generation_of(fields: SamplingFields, model: str, stream: bool | None) -> GenerationFields:
    """The request in the form that all endpoints share. Its streams end with the usage."""
    given = {name: getattr(fields, name) for name in fields.model_fields_set & _SHARED}
    given |= {"model": model, "stream": stream, "session_id": fields.session_name}
    if stream:
        given["stream_options"] = StreamOptions(include_usage=True)
    shared = _BLANK.model_copy(update=given)  # the values are validated already
    shared._lifetime_s = fields.lifetime_s
    return shared


class _SharedFields(GenerationFields):
    """Fields that were read as another body. Only these have a private attribute, which costs each
    body that has one several calls."""

    _lifetime_s: int | None = PrivateAttr(default=None)

    @property
    def lifetime_s(self) -> int | None:
        """See the base class."""
        return self._lifetime_s


def openai_lifetime_s(asked: Any) -> int | None:
    """The lifetime for a value of OpenAI's `prompt_cache_retention`; other values than "24h" mean
    the usual lifetime, None."""
    return LIFETIMES_S["24h"] if asked == "24h" else None


_SHARED = frozenset(SamplingFields.model_fields)
_BLANK = _SharedFields(model="")
