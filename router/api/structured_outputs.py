"""Constraints on an answer's text: OpenAI's `response_format`, vLLM's `structured_outputs`.

Turns either field into the grammar that workers enforce. Errors name the part of the field that
cannot be honoured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag
from starlette.types import Scope

from protocol.errors import InvalidRequest
from router.api.context import ApiContext
from router.api.strict_model import StrictModel, bounded, first_error
from router.text.grammar import (
    check_grammar_length,
    check_schema_length,
    choice_grammar,
    is_gbnf,
    json_object_grammar,
    lark_grammar,
    regex_grammar,
)
from router.text.json_schemas import SchemaReader
from router.text.json_text import decode_json
from router.text.structural_tags import structural_tag_grammar
from router.text.tokenizer import Tokenizer

MAX_CHOICE_TEXTS = 1024
MAX_WEAKENINGS = 4
"""How often a schema is tried again without what llguidance cannot enforce."""
GuidedChoice = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICE_TEXTS), first_error]


class JsonSchema(StrictModel):
    """A named schema. What of it cannot be enforced is dropped and named in the answer's header;
    with `strict` it is an error."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextFormat(StrictModel):
    """Any text, as without a format."""

    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(StrictModel):
    """JSON that conforms to a schema; without a schema, any object."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


def _format_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>"


class StructuralTagFormat(StrictModel):
    """Text in which certain openings begin JSON of a schema: `structures` with `triggers`, or a
    `format` of triggered tags."""

    type: Literal["structural_tag"]
    structures: Annotated[list[dict[str, Any]], bounded] | None = None
    triggers: Annotated[list[str], bounded] | None = None
    format: dict[str, Any] | None = None


FormatFields = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat
ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[JsonSchemaFormat, Tag("<json_schema>")]
    | Annotated[StructuralTagFormat, Tag("<structural_tag>")],
    Discriminator(
        _format_kind,
        custom_error_type="unsupported",
        custom_error_message="its type must be 'text', 'json_object', 'json_schema' or "
        "'structural_tag'",
    ),
]


class StructuredOutputs(StrictModel):
    """Exactly one constraint on the text: JSON of a schema (given as an object or as JSON text),
    any JSON object, a regular expression that matches the whole text, one of several texts, or a
    grammar in llguidance's Lark or in GBNF."""

    json_: Annotated[dict[str, Any] | bool | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: GuidedChoice | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None


@dataclass(frozen=True, slots=True)
class WantedFormat:
    """All fields of a request that constrain its output's text. `guided` are older vLLM's
    `guided_json` and its like."""

    response_format: FormatFields | None = None
    structured_outputs: StructuredOutputs | None = None
    guided: StructuredOutputs | None = None


ANY_TEXT = WantedFormat()


async def wanted_grammar(wanted: WantedFormat, context: ApiContext, scope: Scope) -> str | None:
    """The grammar that the fields ask for; None if any text is allowed.

    Raises InvalidRequest if the grammar is too long or does not compile, or if there is more than
    one constraint.
    """
    if wanted is ANY_TEXT:
        return None
    structured, guided = wanted.structured_outputs, wanted.guided

    def convert() -> _Wishes:
        return [
            *_of_format(wanted.response_format, context.tokenizer),
            *_of_structured(structured, "structured_outputs.", context.tokenizer),
            *_of_structured(guided, "guided_", context.tokenizer),
        ]

    source = next((each.grammar for each in (structured, guided) if each and each.grammar), None)
    if _has_schema(wanted):
        wishes = await context.tokenizer.in_thread(convert)
    elif source is not None and is_gbnf(source):
        wishes = await context.tokenizer.off_loop(convert, len(source))
    else:
        wishes = await context.convert(scope, convert)
    if len(wishes) > 1:
        names = " and ".join(f"'{param}'" for param, _ in wishes)
        raise InvalidRequest(f"{names} exclude each other", wishes[1][0])
    if not wishes:
        return None
    param, wish = wishes[0]
    if isinstance(wish, SchemaReader):
        return await schema_grammar(wish, param, context, scope)
    await context.grammars.check(wish, param)
    return wish


async def schema_grammar(
    reader: SchemaReader, param: str, context: ApiContext, scope: Scope
) -> str:
    """The grammar of a schema, as far as it can be enforced; names what was dropped among the
    request's ignored fields. Raises InvalidRequest if it does not compile."""
    for _ in range(MAX_WEAKENINGS):
        try:
            await context.grammars.check(reader.grammar, param)
            break
        except InvalidRequest as error:
            weaken = partial(reader.try_weaken, error.message)
            if not await context.tokenizer.in_thread(weaken):
                raise
    else:
        await context.grammars.check(reader.grammar, param)
    if reader.dropped:
        context.name_ignored(scope, reader.dropped)
    return reader.grammar


def _has_schema(wanted: WantedFormat) -> bool:
    """Whether a schema has to be read, which is slow."""
    structured, guided = wanted.structured_outputs, wanted.guided
    return isinstance(wanted.response_format, JsonSchemaFormat) or any(
        each is not None and each.json_ is not None for each in (structured, guided)
    )


_Wishes = list[tuple[str, str | SchemaReader]]  # a field's path, and its grammar or schema


def _of_format(wanted: FormatFields | None, tokenizer: Tokenizer) -> _Wishes:
    if isinstance(wanted, JsonObjectFormat):
        return [("response_format", json_object_grammar())]
    if isinstance(wanted, JsonSchemaFormat):
        schema, param = wanted.json_schema.schema_, "response_format.json_schema.schema"
        if schema is None:
            return [(param, json_object_grammar())]
        check_schema_length(schema, param)
        return [(param, SchemaReader(schema, param, bool(wanted.json_schema.strict)))]
    if isinstance(wanted, StructuralTagFormat):
        tag = wanted.model_dump(exclude_none=True)
        return [("response_format", _tag_grammar(tag, "response_format", tokenizer))]
    return []


def _of_structured(wanted: StructuredOutputs | None, prefix: str, tokenizer: Tokenizer) -> _Wishes:
    """The constraints; `prefix` and a constraint's name make the name of the client's field."""
    if wanted is None:
        return []
    wishes: _Wishes = []
    if wanted.json_ is not None:
        param = f"{prefix}json"
        schema = wanted.json_
        if not isinstance(schema, bool):
            schema = _parsed(schema, param)
        wishes.append((param, SchemaReader(schema, param, strict=False)))
    if wanted.json_object:
        wishes.append((f"{prefix}json_object", json_object_grammar()))
    if wanted.regex is not None:
        check_grammar_length(len(wanted.regex), f"{prefix}regex")
        wishes.append((f"{prefix}regex", regex_grammar(wanted.regex)))
    if wanted.choice is not None:
        check_grammar_length(sum(map(len, wanted.choice)), f"{prefix}choice")
        wishes.append((f"{prefix}choice", choice_grammar(wanted.choice)))
    if wanted.grammar is not None:
        param = f"{prefix}grammar"
        wishes.append((param, lark_grammar(wanted.grammar, param)))
    if wanted.structural_tag is not None:
        param = f"{prefix}structural_tag"
        tag = _parsed(wanted.structural_tag, param)
        wishes.append((param, _tag_grammar(tag, param, tokenizer)))
    name = prefix.rstrip("._")
    if not wishes and name != "guided":
        raise InvalidRequest(
            f"'{name}' needs one of json, json_object, regex, choice, grammar and structural_tag",
            name,
        )
    return wishes


def _tag_grammar(tag: dict[str, Any], param: str, tokenizer: Tokenizer) -> str:
    def special_id(text: str) -> int | None:
        token_id = tokenizer.added_token_id(text)
        return token_id if token_id in tokenizer.special_ids else None

    return structural_tag_grammar(tag, param, special_id)


def _parsed(schema: dict[str, Any] | str, param: str) -> dict[str, Any]:
    if isinstance(schema, dict):
        check_schema_length(schema, param)
        return schema
    check_grammar_length(len(schema), param)
    try:
        parsed = decode_json(schema, param)
    except ValueError as error:
        raise InvalidRequest(f"'{param}' is not valid JSON: {error}", param) from error
    if not isinstance(parsed, dict):
        raise InvalidRequest(f"'{param}' must be a JSON object", param)
    return parsed
