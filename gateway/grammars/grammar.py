"""Grammars that constrain an output, as the string that `SamplingParams.grammar` takes.

The string is in llguidance's format: a grammar in its dialect of Lark, or a JSON object of
grammars. The functions here write it from a JSON schema, a list of choices, a regular expression,
Lark or GBNF; `json_schema_part` is for grammars with several parts. JSON is compact, without free
whitespace, unless the schema's own `x-guidance` says otherwise: a small model may otherwise write
blanks without end.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from protocol.errors import InvalidRequest
from protocol.sampling import MAX_GRAMMAR_CHARS

_OPTIONS = "x-guidance"
_MAX_MESSAGE_CHARS = 300
_LEAST_CHARS = 2
_FLOAT_CHARS = 10
"""Encoding a float takes ten times as long as an integer."""
_EXACT_INTEGERS = 2**53
"""Up to this value a float holds the integer exactly, and is written with more characters."""
MAX_GBNF_CHARS = 65_536
"""Converting GBNF takes quadratic time: 0.2 s for this many characters."""
MAX_GRAMMAR_NESTING = 2_000
"""Rules and groups of a client's grammar together: each may nest in the others, and twice as many
overflow a thread's stack of 8 MiB in llguidance, which would end the process."""
MAX_PATTERNS_TOGETHER = 12
"""Patterns that must all hold for one text, or operators `&` and `~` of a client's grammar: 16 take
llguidance 0.1 s, and each one more doubles that."""


def with_integers(schema: Any) -> Any:
    """A copy of a JSON schema in which numbers such as `2.0` have become integers, as the standard
    allows; llguidance requires integers for counts. Floats beyond 2**53 stay."""
    whole = [schema]
    waiting: list[Any] = [whole]
    while waiting:
        part = waiting.pop()
        for place, value in list(part.items() if isinstance(part, dict) else enumerate(part)):
            if isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT_INTEGERS:
                part[place] = int(value)
            elif isinstance(value, dict | list):
                part[place] = value.copy()
                waiting.append(part[place])
    return whole[0]


def json_schema_part(schema: dict[str, Any] | bool) -> str:
    """A JSON value with this schema, as part of a Lark grammar: `%json {...}`."""
    if isinstance(schema, dict):
        given = schema.get(_OPTIONS)
        if given is None or isinstance(given, dict):
            schema = schema | {_OPTIONS: {"whitespace_flexible": False} | (given or {})}
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def text_part(text: str) -> str:
    """This literal text, as part of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def json_schema_grammar(schema: dict[str, Any] | bool) -> str:
    """Exactly one JSON value with this schema."""
    return f"start: {json_schema_part(schema)}"


def json_object_grammar() -> str:
    """Any JSON object."""
    return json_schema_grammar({"type": "object"})


def choice_grammar(choices: Sequence[str]) -> str:
    """One of these texts."""
    return f"start: {' | '.join(text_part(choice) for choice in choices)}"


def regex_grammar(regex: str) -> str:
    """A text that the whole regular expression matches."""
    return str(LLMatcher.grammar_from_regex(regex))


def only_rule(grammar: str) -> str | None:
    """The right side of a single-rule grammar, such as those of JSON and of choices, for use in a
    grammar with several parts; None for any other grammar."""
    head, _, rule = grammar.partition(" ")
    return rule if head == "start:" and "\n" not in rule else None


def shortest_json(value: Any, most: int) -> int:
    """About how many characters a value's JSON has, counted up to a little beyond `most`.

    Unlike an encoder, which runs in one piece, this lets other threads run.
    """
    num_chars, waiting = 0, [value]
    while waiting and num_chars <= most:
        part = waiting.pop()
        num_chars += _LEAST_CHARS
        if isinstance(part, str):
            num_chars += len(part)
        elif isinstance(part, float):
            num_chars += _FLOAT_CHARS
        elif isinstance(part, list):
            waiting.extend(part)
        elif isinstance(part, dict):
            num_chars += sum(map(len, part)) + 4 * len(part)
            waiting.extend(part.values())
    return num_chars


def check_schema_length(schema: Any, param: str) -> None:
    """Raises InvalidRequest for a JSON schema that no grammar can hold, before it is encoded."""
    check_grammar_length(shortest_json(schema, MAX_GRAMMAR_CHARS), param)


def check_grammar_length(num_chars: int, param: str, most: int = MAX_GRAMMAR_CHARS) -> None:
    """Raises InvalidRequest for a grammar, or a source of one, that is too long. Check before the
    source is converted: conversions may take quadratic time."""
    if num_chars > most:
        raise InvalidRequest(
            f"'{param}' makes a grammar of {num_chars} characters; the limit is {most}", param
        )


def is_gbnf(source: str) -> bool:
    """Whether a grammar is GBNF, which is slow to convert."""
    return "::=" in source


def lark_grammar(source: str, param: str) -> str:
    """Lark unchanged; GBNF converted. Raises InvalidRequest naming `param`, also for llguidance's
    JSON objects of grammars: text in them can be escaped, and so hidden from the checks."""
    check_grammar_length(len(source), param)
    if source.lstrip().startswith("{"):
        raise InvalidRequest(f"'{param}' must be a grammar in Lark or GBNF, not JSON", param)
    if not is_gbnf(source):
        _check_operators(source, param)
        return source
    check_grammar_length(len(source), param, MAX_GBNF_CHARS)
    try:
        converted = str(gbnf_to_lark(source))
    except Exception as error:
        raise InvalidRequest(f"'{param}' is not valid GBNF: {brief(str(error))}", param) from error
    _check_operators(converted, param)
    return converted


def _check_operators(source: str, param: str) -> None:
    """Limit the characters that begin a rule, a group or a part of a schema, and those that
    intersect or negate, wherever they occur."""
    if sum(map(source.count, ":([{")) > MAX_GRAMMAR_NESTING:
        raise InvalidRequest(
            f"'{param}' has more than {MAX_GRAMMAR_NESTING} rules and groups together", param
        )
    if sum(map(source.count, "&~")) > MAX_PATTERNS_TOGETHER:
        raise InvalidRequest(
            f"'{param}' has more than {MAX_PATTERNS_TOGETHER} of the characters '&' and '~', which "
            "intersect and negate",
            param,
        )


def brief(message: str) -> str:
    """The first line of an error; llguidance's later lines dump the state of its parser."""
    line = message.strip().partition("\n")[0]
    return line if len(line) <= _MAX_MESSAGE_CHARS else f"{line[:_MAX_MESSAGE_CHARS]}..."
