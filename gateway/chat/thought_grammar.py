"""Grammars of the reasoning before an answer whose form is constrained."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping

from gateway.chat.reasoning_parser import ReasoningMarkers
from gateway.grammars.grammar import text_part

ANY_TEXT = "/(?s:.*)/"
_ANSWER = "constrained_answer"
_LARK_TOKEN = re.compile(
    r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|//[^\n]*|(?<![\w%@$])start(?!\w)'
)


def thought_rules(
    reasoning: ReasoningMarkers, ids: Mapping[str, int], prompt: str, prefill: str = ""
) -> tuple[str, list[str]]:
    """The reasoning that may precede an answer: the beginning of a rule, and further rules that it
    uses. Both are empty if there can be no reasoning. `ids` has the ids of the markers that are
    tokens; `prefill` is the beginning of an answer to be continued."""
    if reasoning.tokens:
        return _in_headers(reasoning, ids, prefill)
    rule = f"thought[suffix={text_part(reasoning.end)}]: {ANY_TEXT}"
    if reasoning.end in ids:
        rule = f"thought: {ANY_TEXT} {marker_part(reasoning.end, ids)}"
    gap = r"gap: /\n{0,2}/"
    if reasoning.is_open(prompt, prefill):
        return "thought gap", [rule, gap]
    is_closed = prompt.rstrip().endswith(reasoning.end)
    if reasoning.begin in ids and not is_closed and not prefill:
        return f"({marker_part(reasoning.begin, ids)} thought gap)?", [rule, gap]
    return "", []


def _in_headers(
    reasoning: ReasoningMarkers, ids: Mapping[str, int], prefill: str
) -> tuple[str, list[str]]:
    if prefill:
        return "", []
    begin, end, behind = (
        marker_parts(text, reasoning.tokens, ids)
        for text in (reasoning.begin, reasoning.end, reasoning.next)
    )
    return "thought?", [f"thought: {begin} {ANY_TEXT} {end} {behind}"]


def marker_parts(text: str, tokens: Collection[str], ids: Mapping[str, int]) -> str:
    """A text as parts of a grammar, in which each of `tokens` is a part of its own."""
    pieces = re.split(f"({'|'.join(map(re.escape, tokens))})", text)
    return " ".join(marker_part(each, ids) for each in pieces if each)


def marked_parts(text: str, ids: Mapping[str, int]) -> str:
    """A text as parts of a grammar, in which each marker of `ids` is its token."""
    return marker_parts(text, ids, ids) if ids else text_part(text)


def escaped(text: str) -> str:
    """The text escaped for a regular expression between slashes."""
    return "".join(f"\\{each}" if each in r"\/.^$|?*+()[]{}" else each for each in text)


def with_thoughts(before: str, rules: list[str], grammar: str) -> str:
    """The grammar with reasoning before it. `before` and `rules` come from `thought_rules`."""
    renamed = _LARK_TOKEN.sub(
        lambda found: _ANSWER if found[0] == "start" else found[0], _as_lark(grammar)
    )
    return "\n".join([renamed, f"start: {before} {_ANSWER}", *rules])


def marker_part(text: str, ids: Mapping[str, int]) -> str:
    """A marker as part of a grammar: as its token if it is one."""
    token_id = ids.get(text)
    return text_part(text) if token_id is None else f"<[{token_id}]>"


def _as_lark(grammar: str) -> str:
    """The grammar in Lark. A grammar of a regular expression comes in llguidance's JSON, which
    holds the Lark."""
    if not grammar.startswith("{"):
        return grammar
    (only,) = json.loads(grammar)["grammars"]
    return str(only["lark_grammar"])
