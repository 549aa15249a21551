"""Grammars that constrain an output, as the string that `SamplingParams.grammar` takes.

The string is in llguidance's format: a grammar in its dialect of Lark, or a JSON object of
grammars. The functions here write it from a JSON schema, a list of choices, a regular expression,
Lark or GBNF; `json_schema_part` is for grammars with several parts. JSON is compact, without free
whitespace, unless the schema's own `x-guidance` says otherwise: a small model may otherwise write
blanks without end. `GrammarChecker` rejects grammars that do not compile, off the event loop.
"""

from __future__ import annotations

import json
import re
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark
from llguidance.numpy import consume_token_par

from gateway.grammars.finite_schemas import nesting
from gateway.grammars.intersections import patterns_together
from gateway.text.tokenizer import Tokenizer
from protocol.errors import InvalidRequest
from protocol.sampling import MAX_GRAMMAR_CHARS

_OPTIONS = "x-guidance"
_MAX_MESSAGE_CHARS = 300
_LEAST_CHARS = 2
_FLOAT_CHARS = 10
"""Encoding a float takes ten times as long as an integer."""
_EXACT_INTEGERS = 2**53
"""Up to this value a float holds the integer exactly, and is written with more characters."""
_REMEMBERED = 256
_WALKED_TOKENS = 4
_SEARCHED_TOKENS = 64
_CLOSING = '"}]:,0tfn'
"""Characters that lead towards the end of a JSON text, the quickest first."""
_WALK_S = 0.2
_NO_GRAMMAR = "start: <|nothing|>"
_JSON_PART = re.compile(r"%json\s*(?=\{)")
_NO_SCHEMAS = frozenset(("properties", "const", "enum", "default", "examples"))
MAX_GBNF_CHARS = 65_536
"""Converting GBNF takes quadratic time: 0.2 s for this many characters."""
MAX_GRAMMAR_NESTING = 2_000
"""Rules and groups of a client's grammar together: each may nest in the others, and twice as many
overflow a thread's stack of 8 MiB in llguidance, which would end the process."""
MAX_SCHEMA_NESTING = 500
"""Levels of a JSON schema: a third of what overflows such a stack."""
MAX_PATTERNS_TOGETHER = 12
"""Patterns that must all hold for one text, or operators `&` and `~` of a client's grammar: 16 take
llguidance 0.1 s, and each one more doubles that."""
MAX_OPTIONAL_PROPERTIES = 480
"""The most optional properties in a row in one object of a schema: llguidance fails beyond 498."""


def with_integers(schema: Any) -> Any:
    """A copy of a JSON schema in which numbers such as `2.0` have become integers, as the standard
    allows; llguidance requires it of counts. Floats beyond 2**53 stay."""
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
        raise InvalidRequest(f"'{param}' is not valid GBNF: {_brief(str(error))}", param) from error
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


class GrammarChecker:
    """Checks that grammars compile against the vocabulary, in the tokenizer's threads. Remembers
    the latest valid ones."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        """`folder` is the checkpoint's folder. If llguidance cannot read the vocabulary, no error
        is raised here, but `check` refuses every grammar."""
        self._tokenizer = tokenizer
        self._vocabulary: LLTokenizer | None = None
        self._trouble = ""
        try:
            self._vocabulary = LLTokenizer(str(folder / "tokenizer.json"), slices=[])
        except ValueError as error:
            self._trouble = _brief(str(error))
        self._closing_ids: list[int] = []
        if self._vocabulary is not None:
            closing = [self._vocabulary.tokenize_str(each) for each in _CLOSING]
            self._closing_ids = [ids[0] for ids in closing if len(ids) == 1]
        self._limits = LLParserLimits(verbose_errors=False)
        self._executor = LLExecutor(1)
        self._good: OrderedDict[str, None] = OrderedDict()

    async def check(self, grammar: str, param: str) -> None:
        """Raises InvalidRequest, naming `param`, for a grammar that cannot be compiled."""
        if self._vocabulary is None:
            raise InvalidRequest(
                f"'{param}': this model's tokenizer allows no structured output: {self._trouble}",
                param,
            )
        check_grammar_length(len(grammar), param)
        if grammar in self._good:
            self._good.move_to_end(grammar)
            return
        trouble = await self._tokenizer.in_thread(lambda: self._compile(grammar))
        if trouble:
            raise InvalidRequest(f"'{param}' cannot be compiled: {trouble}", param)
        self._good[grammar] = None
        if len(self._good) > _REMEMBERED:
            self._good.popitem(last=False)

    def _walk(self, matcher: LLMatcher, spare: LLMatcher, steps: int, wanted: list[int]) -> None:
        """Consume tokens, so that a grammar that exceeds a limit or has a dead end fails here, not
        in a worker. Each is the first allowed one of `wanted`, or the first allowed one of all. A
        walk that takes long is given up: workers limit the grammar's time, and others need this
        thread.

        `consume_token` keeps the interpreter's lock, which would hold up the event loop; so does
        `consume_token_par` for a single matcher, hence a `spare` one, which consumes nothing.
        """
        deadline = time.monotonic() + _WALK_S
        for _ in range(steps):
            if matcher.is_error() or matcher.is_stopped() or time.monotonic() > deadline:
                return
            allowed = int.from_bytes(matcher.compute_bitmask(), "little")
            if not allowed:
                return
            lowest = (allowed & -allowed).bit_length() - 1
            token_id = next((each for each in wanted if allowed >> each & 1), lowest)
            consume_token_par(self._executor, [(matcher, token_id), (spare, 0)])

    def _compile(self, grammar: str) -> str:
        """The grammar's error, or "". Building a matcher checks more than validation does, but
        the limits of a step show only in use."""
        assert self._vocabulary is not None
        trouble = _trouble_of_schemas(grammar)
        if trouble:
            return trouble
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=self._limits)
        spare = LLMatcher(self._vocabulary, _NO_GRAMMAR, log_level=0)
        closing = matcher.deep_copy()
        self._walk(matcher, spare, _WALKED_TOKENS, [])
        if not matcher.is_error():
            self._walk(closing, spare, _SEARCHED_TOKENS, self._closing_ids)
            matcher = closing
        return plain_trouble(matcher.get_error()) if matcher.is_error() else ""


def too_hard(schema: Any) -> str:
    """Why llguidance must not read a JSON schema: its levels would overflow the stack, which ends
    the process, or its patterns would take minutes. "" if it may."""
    if nesting(schema) > MAX_SCHEMA_NESTING:
        return (
            f"nests too deeply: more than {MAX_SCHEMA_NESTING} levels, counted through its "
            "references"
        )
    if patterns_together(schema) > MAX_PATTERNS_TOGETHER:
        return f"has more than {MAX_PATTERNS_TOGETHER} patterns that must hold for one text"
    return ""


def _trouble_of_schemas(grammar: str) -> str:
    """Why llguidance must not read one of the grammar's JSON schemas; "" if it may."""
    for schema in _schemas_of(grammar):
        trouble = too_hard(schema)
        if trouble:
            return f"a schema in it {trouble}"
        trouble = _too_many_properties(schema)
        if trouble:
            return trouble
    return ""


def _too_many_properties(schema: Any) -> str:
    """Why llguidance would give up inside an object of a JSON schema, or "".

    After a property, any of the next optional ones up to the next required one may follow. Each
    takes four items of a parser's row, which has 2,000.
    """
    most = _optional_run(schema)
    if most <= MAX_OPTIONAL_PROPERTIES:
        return ""
    return (
        f"an object has {most} optional properties in a row; the limit is "
        f"{MAX_OPTIONAL_PROPERTIES}: list some of them as 'required'"
    )


def _schemas_of(grammar: str) -> Iterator[Any]:
    """The JSON schemas inside a grammar, in either of llguidance's formats."""
    decoder = json.JSONDecoder()
    starts = [match.end() for match in _JSON_PART.finditer(grammar)]
    for start in [0] if grammar.startswith("{") else starts:
        try:
            yield decoder.raw_decode(grammar, start)[0]
        except (ValueError, RecursionError):
            continue  # not JSON: compiling it says why


def _optional_run(schema: Any) -> int:
    """The longest run of optional properties in any object that a schema describes."""
    longest, waiting = 0, [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting.extend(part)
        if not isinstance(part, dict):
            continue
        waiting.extend(value for key, value in part.items() if key not in _NO_SCHEMAS)
        properties, required = part.get("properties"), part.get("required")
        if isinstance(properties, dict):
            waiting.extend(properties.values())
            names = required if isinstance(required, list) else []
            needed = {name for name in names if isinstance(name, str)}
            run = 0
            for name in properties:
                run = 0 if name in needed else run + 1
                longest = max(longest, run)
    return longest


def plain_trouble(message: str) -> str:
    """An error of llguidance in one line; for a pattern, with its fault."""
    if "NoExtensionBias" in message:
        return "it has a dead end: there is a beginning that nothing can follow"
    if "Too many items" in message or "ff_tokens" in message:
        return "it is too large, or no finite text follows it (is a reference to itself required?)"
    if "regex parse error" in message:
        lines = [each.strip() for each in message.strip().splitlines()]
        reason = next((each for each in lines if each.startswith("error: ")), "")
        return _brief(f"{lines[0]} {reason.removeprefix('error: ')}".rstrip())
    return _brief(message)


def _brief(message: str) -> str:
    """The first line of an error; llguidance's later lines dump the state of its parser."""
    line = message.strip().partition("\n")[0]
    return line if len(line) <= _MAX_MESSAGE_CHARS else f"{line[:_MAX_MESSAGE_CHARS]}..."
