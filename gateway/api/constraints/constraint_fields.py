"""The fields that constrain an answer's text: OpenAI's `response_format`, vLLM's
`structured_outputs`, and the variants of both that other servers accept.

Unknown fields inside them are refused, because ignoring one could drop a constraint.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from gateway.api.constraints.constraint import Constraint, ConstraintKind
from gateway.api.strict_model import StrictModel, bounded, first_error
from gateway.api.union_branches import BOOLEAN, OBJECT, TEXT, by_shape
from gateway.api.unknown_fields.ignorable_fields import ignorable
from protocol.errors import InvalidRequest

MAX_CHOICE_TEXTS = 1024
GuidedChoice = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICE_TEXTS), first_error]
SchemaValue = Annotated[
    Annotated[dict[str, Any], OBJECT] | Annotated[bool, BOOLEAN] | Annotated[str, TEXT],
    by_shape(dict, bool, str),
]
"""A JSON schema, or its JSON text."""
ObjectOrText = Annotated[
    Annotated[dict[str, Any], OBJECT] | Annotated[str, TEXT], by_shape(dict, str)
]
_WRAPPER_FIELDS = frozenset(("name", "schema", "strict", "description"))


class ConstraintFields(StrictModel):
    """Base class of the fields that constrain the text."""

    refuses_unknown: ClassVar[bool] = True


class JsonSchema(ConstraintFields):
    """A schema. Parts that cannot be enforced are dropped and listed in a response header.
    With `strict`, they are an error."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] | None = None
    description: str | None = None
    schema_: Annotated[
        Annotated[
            Annotated[dict[str, Any], OBJECT] | Annotated[bool, BOOLEAN], by_shape(dict, bool)
        ]
        | None,
        Field(alias="schema"),
    ] = None
    strict: bool | None = None


class TextFormat(ConstraintFields):
    """Any text, as without a format."""

    type: Literal["text"]

    def constraints(self, path: str) -> Iterator[Constraint]:
        """Yields nothing: any text is allowed."""
        yield from ()


class JsonObjectFormat(ConstraintFields):
    """Any JSON object, or JSON that matches `schema`. TGI calls the schema `value`."""

    type: Literal["json_object", "json"]
    schema_: Annotated[SchemaValue | None, Field(alias="schema")] = None
    value: SchemaValue | None = None

    def constraints(self, path: str) -> Iterator[Constraint]:
        """The constraints of the field at `path`."""
        if self.schema_ is None and self.value is None:
            yield Constraint(path, ConstraintKind.OBJECT)
        yield from schema_constraints(f"{path}.schema", self.schema_)
        yield from schema_constraints(f"{path}.value", self.value)


class JsonSchemaFormat(ConstraintFields):
    """JSON that matches a schema. Chat completions send the schema in `json_schema`,
    `/v1/responses` in `schema`, TGI in `value`. A `json_schema` without a schema allows any
    object."""

    type: Literal["json_schema"]
    json_schema: JsonSchema | None = None
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] | None = None
    description: str | None = None
    schema_: Annotated[SchemaValue | None, Field(alias="schema")] = None
    strict: bool | None = None
    value: SchemaValue | None = None

    def constraints(self, path: str) -> Iterator[Constraint]:
        """The constraints of the field at `path`. Raises InvalidRequest if there are none."""
        named = self.json_schema
        if named is not None:
            param = f"{path}.json_schema.schema"
            if named.schema_ is None:
                yield Constraint(param, ConstraintKind.OBJECT)
            yield from schema_constraints(param, named.schema_, bool(named.strict))
        elif self.schema_ is None and self.value is None:
            raise InvalidRequest(f"'{path}' needs a schema", f"{path}.schema")
        yield from schema_constraints(f"{path}.schema", self.schema_, bool(self.strict))
        yield from schema_constraints(f"{path}.value", self.value, bool(self.strict))


class RegexFormat(ConstraintFields):
    """A full match of a regular expression. Servers differ in the name of its field."""

    type: Literal["regex"]
    pattern: str | None = None
    regex: str | None = None
    value: str | None = None

    def constraints(self, path: str) -> Iterator[Constraint]:
        """The constraints of the field at `path`. Raises InvalidRequest if there are none."""
        return _texts(self, ("pattern", "regex", "value"), path, ConstraintKind.REGEX)


class GrammarFormat(ConstraintFields):
    """Text derived from a grammar in Lark or GBNF."""

    type: Literal["grammar"]
    grammar: str | None = None
    value: str | None = None

    def constraints(self, path: str) -> Iterator[Constraint]:
        """The constraints of the field at `path`. Raises InvalidRequest if there are none."""
        return _texts(self, ("grammar", "value"), path, ConstraintKind.GRAMMAR)


class StructuralTagFormat(ConstraintFields):
    """Text in which JSON that matches a schema follows certain tags. The tags are `structures`
    with `triggers`, or a `format`."""

    type: Literal["structural_tag"]
    structures: Annotated[list[dict[str, Any]], bounded] | None = None
    triggers: Annotated[list[str], bounded] | None = None
    format: dict[str, Any] | None = None

    def constraints(self, path: str) -> Iterator[Constraint]:
        """The constraint of the field at `path`."""
        tag = self.model_dump(exclude_none=True)
        yield Constraint(path, ConstraintKind.STRUCTURAL_TAG, tag)


def _format_kind(value: Any) -> str:
    if isinstance(value, str):
        return "<source>"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<json_object>" if kind == "json" else f"<{kind}>"


_BY_TYPE = Discriminator(
    _format_kind,
    custom_error_type="unsupported",
    custom_error_message="its type must be 'text', 'json_object', 'json_schema', 'regex', "
    "'grammar' or 'structural_tag'",
)
_Formats = (
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[JsonSchemaFormat, Tag("<json_schema>")]
    | Annotated[RegexFormat, Tag("<regex>")]
    | Annotated[GrammarFormat, Tag("<grammar>")]
    | Annotated[StructuralTagFormat, Tag("<structural_tag>")]
)
ResponseFormat = Annotated[_Formats, _BY_TYPE]
GrammarOrFormat = Annotated[Annotated[str, Tag("<source>")] | _Formats, _BY_TYPE]
"""The `grammar` field: llama.cpp sends a grammar's source text, TGI a format object."""


class StructuredOutputs(ConstraintFields):
    """Exactly one constraint on the text: JSON that matches a schema (an object or JSON text), any
    JSON object, a regular expression that matches the whole text, one of several texts, or a
    grammar in llguidance's Lark or in GBNF. JSON is always compact."""

    json_: Annotated[SchemaValue | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: GuidedChoice | None = None
    grammar: str | None = None
    structural_tag: ObjectOrText | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None
    whitespace_pattern: Annotated[Any, ignorable()] = None
    backend: Annotated[Any, ignorable()] = None

    def constraints(self, prefix: str) -> Iterator[Constraint]:
        """The constraints. A constraint's `param` is `prefix` followed by the field's name."""
        yield from schema_constraints(f"{prefix}json", self.json_)
        if self.json_object:
            yield Constraint(f"{prefix}json_object", ConstraintKind.OBJECT)
        for name, kind in (
            ("regex", ConstraintKind.REGEX),
            ("choice", ConstraintKind.CHOICE),
            ("grammar", ConstraintKind.GRAMMAR),
            ("structural_tag", ConstraintKind.STRUCTURAL_TAG),
        ):
            value = getattr(self, name)
            if value is not None:
                yield Constraint(f"{prefix}{name}", kind, value)


def schema_constraints(
    param: str, schema: SchemaValue | None, strict: bool = False
) -> Iterator[Constraint]:
    """The constraint of `schema`; nothing for None. The schema may be wrapped, as in
    `response_format.json_schema`. Raises InvalidRequest if the wrapped value cannot be a schema."""
    if isinstance(schema, dict) and "schema" in schema and schema.keys() <= _WRAPPER_FIELDS:
        strict = strict or schema.get("strict") is True
        schema, param = schema["schema"], f"{param}.schema"
        if not isinstance(schema, dict | bool | str | None):
            raise InvalidRequest(f"'{param}' must be an object, a boolean or JSON text", param)
    if schema is not None:
        yield Constraint(param, ConstraintKind.SCHEMA, schema, strict)


def _texts(
    fields: ConstraintFields, names: tuple[str, ...], path: str, kind: ConstraintKind
) -> Iterator[Constraint]:
    """A constraint for each of the named fields that has a value. Raises InvalidRequest if none
    has."""
    given = [name for name in names if getattr(fields, name) is not None]
    if not given:
        raise InvalidRequest(f"'{path}.{names[0]}' is required", f"{path}.{names[0]}")
    return (Constraint(f"{path}.{name}", kind, getattr(fields, name)) for name in given)
