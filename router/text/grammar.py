"""Grammars that constrain an output, as the string that `SamplingParams.grammar` takes.

The string is in llguidance's format: a grammar in its dialect of Lark, or a JSON object of
grammars. The functions here write it from a JSON schema, a list of choices, a regular expression,
Lark or GBNF; `json_schema_part` is for grammars with several parts. JSON is compact, without free
whitespace, unless the schema's own `x-guidance` says otherwise: a small model that is allowed to
write endless blanks does so. `GrammarChecker` rejects grammars that do not compile, off the event
loop.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from protocol.errors import InvalidRequest
from protocol.sampling import MAX_GRAMMAR_CHARS
from router.text.tokenizer import Tokenizer

_OPTIONS = "x-guidance"
_MAX_MESSAGE_CHARS = 300
_REMEMBERED = 256


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


def lark_grammar(source: str, param: str) -> str:
    """Lark unchanged; GBNF (has `::=`) converted. Raises InvalidRequest naming `param`."""
    if "::=" not in source:
        return source
    try:
        return str(gbnf_to_lark(source))
    except (GbnfToLarkError, RecursionError) as error:
        raise InvalidRequest(f"'{param}' is not valid GBNF: {_brief(str(error))}", param) from error


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
        self._limits = LLParserLimits(verbose_errors=False)
        self._good: OrderedDict[str, None] = OrderedDict()

    async def check(self, grammar: str, param: str) -> None:
        """Raises InvalidRequest, naming `param`, for a grammar that cannot be compiled."""
        if self._vocabulary is None:
            raise InvalidRequest(
                f"'{param}': this model's tokenizer allows no structured output: {self._trouble}",
                param,
            )
        if grammar in self._good:
            self._good.move_to_end(grammar)
            return
        if len(grammar) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(
                f"'{param}' makes a grammar of {len(grammar)} characters; "
                f"the limit is {MAX_GRAMMAR_CHARS}",
                param,
            )
        trouble = await self._tokenizer.in_thread(lambda: self._compile(grammar))
        if trouble:
            raise InvalidRequest(f"'{param}' cannot be compiled: {trouble}", param)
        self._good[grammar] = None
        if len(self._good) > _REMEMBERED:
            self._good.popitem(last=False)

    def _compile(self, grammar: str) -> str:
        """The grammar's error, or "". Building a matcher checks more than validation does."""
        assert self._vocabulary is not None
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=self._limits)
        return _brief(matcher.get_error()) if matcher.is_error() else ""


def _brief(message: str) -> str:
    """The first line of an error; llguidance's later lines dump the state of its parser."""
    line = message.strip().partition("\n")[0]
    return line if len(line) <= _MAX_MESSAGE_CHARS else f"{line[:_MAX_MESSAGE_CHARS]}..."
