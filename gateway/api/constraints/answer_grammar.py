"""The grammar that workers enforce, made from the constraints of a request.

Errors name the part of the field that cannot be honoured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.types import Scope

from gateway.api.constraints.constraint import Constraint, ConstraintKind
from gateway.api.context import ApiContext
from gateway.grammars.grammar import (
    check_grammar_length,
    check_schema_length,
    choice_grammar,
    is_gbnf,
    json_object_grammar,
    lark_grammar,
    regex_grammar,
)
from gateway.grammars.json_schemas import SchemaReader
from gateway.grammars.structural_tags import structural_tag_grammar
from gateway.text.json_text import decode_json
from gateway.text.tokenizer import Tokenizer
from protocol.errors import InvalidRequest

MAX_WEAKENINGS = 4
"""The most attempts to compile a schema. Each attempt drops one more part that llguidance cannot
enforce."""


async def wanted_grammar(
    constraints: Sequence[Constraint], context: ApiContext, scope: Scope
) -> str | None:
    """The grammar of a request's constraint; None if any text is allowed.

    Raises InvalidRequest if the grammar is too long or does not compile, or if two constraints
    differ.
    """
    if not constraints:
        return None
    constraint = constraints[0]
    if len(constraints) > 1:
        constraint = await context.convert(scope, partial(_common, constraints))
    convert = partial(_converted, constraint, context.tokenizer)
    if constraint.kind is ConstraintKind.SCHEMA:
        wish = await context.tokenizer.in_thread(convert)
    elif constraint.kind is ConstraintKind.GRAMMAR and is_gbnf(constraint.value):
        wish = await context.tokenizer.off_loop(convert, len(constraint.value))
    else:
        wish = await context.convert(scope, convert)
    if isinstance(wish, SchemaReader):
        return await _schema_grammar(wish, constraint.param, context, scope)
    await context.grammars.check(wish, constraint.param)
    return wish


async def _schema_grammar(
    reader: SchemaReader, param: str, context: ApiContext, scope: Scope
) -> str:
    """The grammar of a schema, as far as it can be enforced; names what was dropped among the
    request's ignored fields. Raises InvalidRequest if it does not compile."""
    await check_schema(reader, param, context)
    if reader.dropped:
        context.name_ignored(scope, reader.dropped)
    return reader.grammar


async def check_schema(reader: SchemaReader, param: str, context: ApiContext) -> None:
    """Drops the parts of a schema that llguidance cannot enforce. Raises InvalidRequest, naming
    `param`, if the rest does not compile, or if a strict schema cannot be enforced."""
    for _ in range(MAX_WEAKENINGS):
        try:
            await context.grammars.check(reader.grammar, param)
            return
        except InvalidRequest as error:
            weaken = partial(reader.try_weaken, error.message)
            if not await context.tokenizer.in_thread(weaken):
                raise
    await context.grammars.check(reader.grammar, param)


def _common(constraints: Sequence[Constraint]) -> Constraint:
    """The constraint that all of these express, strict if one of them is: clients that do not know
    their server send one schema under several names. Raises InvalidRequest if two differ."""
    first, *others = constraints
    for other in others:
        if other.kind is not first.kind or _comparable(other) != _comparable(first):
            names = " and ".join(f"'{each.param}'" for each in constraints)
            raise InvalidRequest(f"{names} exclude each other", other.param)
    return replace(first, strict=any(each.strict for each in constraints))


def _comparable(constraint: Constraint) -> str:
    """A text that is equal for equal values of one kind: in JSON, 1 is not true. Raises
    InvalidRequest."""
    value = constraint.value
    if constraint.kind in (ConstraintKind.SCHEMA, ConstraintKind.STRUCTURAL_TAG):
        value = value if isinstance(value, bool) else _parsed(value, constraint.param)
    return json.dumps(value, sort_keys=True)


def _converted(constraint: Constraint, tokenizer: Tokenizer) -> str | SchemaReader:
    """The constraint as a grammar, or as a schema that may have to be weakened. Raises
    InvalidRequest."""
    param, value = constraint.param, constraint.value
    match constraint.kind:
        case ConstraintKind.OBJECT:
            return json_object_grammar()
        case ConstraintKind.SCHEMA:
            schema = value if isinstance(value, bool) else _parsed(value, param)
            return SchemaReader(schema, param, constraint.strict)
        case ConstraintKind.REGEX:
            check_grammar_length(len(value), param)
            return regex_grammar(value)
        case ConstraintKind.CHOICE:
            check_grammar_length(sum(map(len, value)), param)
            return choice_grammar(value)
        case ConstraintKind.GRAMMAR:
            return lark_grammar(value, param)
        case ConstraintKind.STRUCTURAL_TAG:
            return _tag_grammar(_parsed(value, param), param, tokenizer)


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
