"""Grammars of calls with named arguments: `name(key=value, key=value)`.

Arguments follow the order of the schema's properties; required ones are always present. Values are
JSON, which the parser of such calls accepts besides Python literals.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gateway.grammars.grammar import check_grammar_length, json_schema_part, text_part
from http_kit.errors import MAX_PARAM_CHARS, shortened
from protocol.errors import InvalidRequest

KEY = r"[\w.$-]{1,128}"
"""Names of arguments, as a regular expression."""
_DEFINITIONS = ("$defs", "definitions")


def keyword_call(rule: str, name: str, schema: dict[str, Any], ids: Mapping[str, int]) -> list[str]:
    """The rules of one call, of which the first is named `rule`; see `CallRules`.

    Only properties that the schema lists or requires are arguments. Raises InvalidRequest if one
    has a name that cannot be written as a keyword, and for rules that are too long.
    """
    properties, required = arguments_of(schema)
    definitions = {each: schema[each] for each in _DEFINITIONS if each in schema}
    rules = [f"{rule}: {text_part(name + '(')} {rule}_first_0 {text_part(')')}"]
    num_chars = 0
    for place, (key, wanted) in enumerate(properties.items()):
        if not re.fullmatch(KEY, key, re.ASCII):
            shown = shortened(key, MAX_PARAM_CHARS)
            raise InvalidRequest(
                f"'tools': {shown!r}, an argument of {name!r}, cannot be written by this model",
                "tools",
            )
        value = wanted | definitions if isinstance(wanted, dict) else wanted
        argument, after = f"{rule}_argument_{place}", f"{rule}_next_{place + 1}"
        rules.append(f"{argument}: {text_part(key + '=')} {json_schema_part(value)}")
        num_chars += len(rules[-1])
        check_grammar_length(num_chars, "tools")  # definitions are repeated for every argument
        first, further = f"{argument} {after}", f"{text_part(', ')} {argument} {after}"
        if key not in required:
            first += f" | {rule}_first_{place + 1}"
            further += f" | {after}"
        rules += [f"{rule}_first_{place}: {first}", f"{rule}_next_{place}: {further}"]
    end = len(properties)
    return [*rules, f'{rule}_first_{end}: ""', f'{rule}_next_{end}: ""']


def arguments_of(schema: dict[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """Properties by name, in order, and the names of the required ones."""
    listed, wanted = schema.get("properties"), schema.get("required")
    properties = dict(listed) if isinstance(listed, dict) else {}
    named = wanted if isinstance(wanted, list) else []
    required = [each for each in named if isinstance(each, str)]
    for key in required:
        properties.setdefault(key, True)
    return properties, frozenset(required)
