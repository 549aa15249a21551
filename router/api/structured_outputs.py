"""Constraints on an answer's text: OpenAI's `response_format`, vLLM's `structured_outputs`.

Turns either field into the grammar that workers enforce. Errors name the part of the field that
cannot be honoured.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from protocol.errors import InvalidRequest
from router.text.grammar import (
    GrammarChecker,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)

MAX_CHOICE_TEXTS = 1024
_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class JsonSchema(BaseModel):
    """A named schema. The output always conforms to the schema, regardless of `strict`."""

    model_config = _STRICT

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextFormat(BaseModel):
    """Any text, as without a format."""

    model_config = _STRICT

    type: Literal["text"]


class JsonObjectFormat(BaseModel):
    """Any JSON object."""

    model_config = _STRICT

    type: Literal["json_object"]


class JsonSchemaFormat(BaseModel):
    """JSON that conforms to a schema; without a schema, any object."""

    model_config = _STRICT

    type: Literal["json_schema"]
    json_schema: JsonSchema


def _format_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>"


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[JsonSchemaFormat, Tag("<json_schema>")],
    Discriminator(
        _format_kind,
        custom_error_type="unsupported",
        custom_error_message="its type must be 'text', 'json_object' or 'json_schema'",
    ),
]


class StructuredOutputs(BaseModel):
    """Exactly one constraint on the text: JSON of a schema (given as an object or as JSON text),
    any JSON object, a regular expression that matches the whole text, one of several texts, or a
    grammar in llguidance's Lark or in GBNF."""

    model_config = _STRICT

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICE_TEXTS)] | None = None
    grammar: str | None = None
    structural_tag: Annotated[None, Field(description="Not supported.")] = None


async def wanted_grammar(
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None,
    structured_outputs: StructuredOutputs | None,
    checker: GrammarChecker,
) -> str | None:
    """The grammar that the two fields ask for; None if any text is allowed.

    Raises InvalidRequest if the grammar does not compile, or if there is more than one constraint.
    """
    wishes = _of_format(response_format) + _of_structured(structured_outputs)
    if len(wishes) > 1:
        names = " and ".join(f"'{param}'" for param, _ in wishes)
        raise InvalidRequest(f"{names} exclude each other", wishes[1][0])
    if not wishes:
        return None
    param, grammar = wishes[0]
    await checker.check(grammar, param)
    return grammar


_Wishes = list[tuple[str, str]]  # a field's path, and its grammar


def _of_format(wanted: TextFormat | JsonObjectFormat | JsonSchemaFormat | None) -> _Wishes:
    if isinstance(wanted, JsonObjectFormat):
        return [("response_format", json_object_grammar())]
    if isinstance(wanted, JsonSchemaFormat):
        schema = wanted.json_schema.schema_
        grammar = json_object_grammar() if schema is None else json_schema_grammar(schema)
        return [("response_format.json_schema.schema", grammar)]
    return []


def _of_structured(wanted: StructuredOutputs | None) -> _Wishes:
    if wanted is None:
        return []
    name, wishes = "structured_outputs", []
    if wanted.json_ is not None:
        schema = _parsed(wanted.json_, f"{name}.json")
        wishes.append((f"{name}.json", json_schema_grammar(schema)))
    if wanted.json_object:
        wishes.append((f"{name}.json_object", json_object_grammar()))
    if wanted.regex is not None:
        wishes.append((f"{name}.regex", regex_grammar(wanted.regex)))
    if wanted.choice is not None:
        wishes.append((f"{name}.choice", choice_grammar(wanted.choice)))
    if wanted.grammar is not None:
        param = f"{name}.grammar"
        wishes.append((param, lark_grammar(wanted.grammar, param)))
    if not wishes:
        raise InvalidRequest(
            f"'{name}' needs one of json, json_object, regex, choice and grammar", name
        )
    return wishes


def _parsed(schema: dict[str, Any] | str, param: str) -> dict[str, Any]:
    if isinstance(schema, dict):
        return schema
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"'{param}' is not valid JSON: {error}", param) from error
    if not isinstance(parsed, dict):
        raise InvalidRequest(f"'{param}' must be a JSON object", param)
    return parsed
