"""Rejects grammars that workers could not compile or follow, before a worker sees them.

llguidance compiles a grammar and takes some steps with it, off the event loop. Schemas that would
end the process, or take it minutes, are found before llguidance reads them.
"""

from __future__ import annotations

import json
import re
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import consume_token_par

from checkpoint.vocabularies.tokenizer_json import path_or_content, tokenizer_file
from gateway.grammars.finite_schemas import nesting
from gateway.grammars.grammar import MAX_PATTERNS_TOGETHER, brief, check_grammar_length
from gateway.grammars.inner_schemas import inner_schemas
from gateway.grammars.intersections import patterns_together
from gateway.text.tokenizer import Tokenizer
from protocol.errors import InvalidRequest

_REMEMBERED = 256
_WALKED_TOKENS = 4
_SEARCHED_TOKENS = 64
_CLOSING = '"}]:,0tfn'
"""Characters that lead towards the end of a JSON text, the quickest first."""
_WALK_S = 0.2
_IN_SCHEMA = "at 1(8): failed to compile JSON schema: "
_NO_GRAMMAR = "start: <|nothing|>"
_JSON_PART = re.compile(r"%json\s*(?=\{)")
MAX_REPEATS = 2**32 - 1
"""The largest count in a regular expression."""
MAX_SCHEMA_NESTING = 500
"""Levels of a JSON schema: a third of what overflows a thread's stack of 8 MiB in llguidance."""
MAX_OPTIONAL_PROPERTIES = 480
"""The most optional properties in a row in one object of a schema: llguidance fails beyond 498."""


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
            self._vocabulary = LLTokenizer(path_or_content(tokenizer_file(folder)), slices=[])
        except ValueError as error:
            self._trouble = brief(str(error))
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
        in a worker. Each token is the first allowed one of `wanted`, or else the first allowed
        token at all. A walk that takes long is given up: workers limit the grammar's time, and
        other work needs this thread.

        `consume_token` keeps the interpreter's lock, which would hold up the event loop. So does
        `consume_token_par` with a single matcher. It therefore gets a second one, `spare`, which
        consumes nothing.
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
    longest = 0
    for part in inner_schemas(schema):
        properties, required = part.get("properties"), part.get("required")
        if isinstance(properties, dict):
            names = required if isinstance(required, list) else []
            needed = {name for name in names if isinstance(name, str)}
            run = 0
            for name in properties:
                run = 0 if name in needed else run + 1
                longest = max(longest, run)
    return longest


def plain_trouble(message: str) -> str:
    """An error of llguidance in one line; for a pattern, with its fault. Leaves out the place of a
    JSON schema in the grammar that was made of it, which the client did not write."""
    message = message.removeprefix(_IN_SCHEMA)
    if "NoExtensionBias" in message:
        return "it has a dead end: there is a beginning that nothing can follow"
    if "Too many items" in message or "ff_tokens" in message:
        return "it is too large, or no finite text follows it (is a reference to itself required?)"
    if "too many expressions" in message:
        return "a pattern in it is too large"
    if "decimal literal invalid" in message:
        return f"a pattern or a length in it has a count of more than {MAX_REPEATS}"
    if "number out of range" in message:
        return "a number in it is out of range: larger than 1.7e308"
    if "regex parse error" in message:
        lines = [each.strip() for each in message.strip().splitlines()]
        reason = next((each for each in lines if each.startswith("error: ")), "")
        return brief(f"{lines[0]} {reason.removeprefix('error: ')}".rstrip())
    return brief(message)
