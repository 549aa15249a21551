"""Grammars that enforce tool calls: the caller's tool choice, and the schemas of strict tools.

If a call is required, the whole answer is calls (after the reasoning of a model that has tokens
for it). If calls are optional, the grammar only constrains the text after a call's first marker,
unless an answer without calls has its own form: then the whole answer is that form or calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.chat.conversation import Conversation, Tool, ToolMode
from gateway.chat.reasoning_parser import ReasoningMarkers
from gateway.chat.thought_grammar import (
    ANY_TEXT,
    escaped,
    marked_parts,
    marker_parts,
    thought_rules,
)
from gateway.grammars.grammar import check_grammar_length, json_schema_part, text_part
from protocol.errors import InvalidRequest

NamePart = Callable[[str], str]
"""Returns the part of a grammar that a tool's name is written as."""
CallRules = Callable[[str, str, dict[str, Any], Mapping[str, int]], list[str]]
"""Returns the rules of one call, given the name of the first rule, the tool's name, its schema and
the ids of markers that are tokens."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a family writes calls: `opening` (`begin` call `end`, by `separator`) `closing`.

    Each is a sequence of texts, some of which may be single tokens. A call is a JSON object with
    the arguments under `arguments_key`. If `arguments_key` is None, a call is the name (as
    `name_part` says), `middle` and the arguments. A family that writes calls in its own way has
    `call_rules`. If `is_marked` is False, no text shows for certain where calls begin. If
    `separator` is None, there is at most one call. If `is_whole` is True, a message is a call or an
    answer, each with a header.
    """

    opening: tuple[str, ...] = ()
    begin: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()
    separator: tuple[str, ...] | None = None
    arguments_key: str | None = "arguments"
    middle: tuple[str, ...] = ()
    name_part: NamePart = text_part
    call_rules: CallRules | None = None
    is_marked: bool = True
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class ToolGrammar:
    """Builds grammars for a model whose calls have this form; `ids` are its marker tokens."""

    form: CallForm
    ids: Mapping[str, int]

    def of(
        self,
        conversation: Conversation,
        reasoning: ReasoningMarkers | None,
        prompt: str,
        form_without_calls: str | None = None,
    ) -> str | None:
        """The grammar of an answer; None if any text is allowed. Raises InvalidRequest.

        `form_without_calls` is the right side of a rule, for an answer with optional calls.
        """
        mode, tools = conversation.tool_choice.mode, conversation.tools
        thought: tuple[str, list[str]] = ("", [])
        if reasoning is not None:
            thought = thought_rules(reasoning, self.ids, prompt, conversation.prefill)
        if mode is ToolMode.NAMED:
            chosen = [each for each in tools if each.name == conversation.tool_choice.name]
            return self._whole(self._calls(False), chosen, thought)
        calls = self._calls(conversation.parallel_tool_calls)
        if mode is ToolMode.REQUIRED:
            return self._whole(calls, tools, thought)
        is_strict = mode is ToolMode.AUTO and any(tool.strict for tool in tools)
        if is_strict and self.form.is_whole:
            form_without_calls = form_without_calls or ANY_TEXT
        if mode is ToolMode.AUTO and form_without_calls is not None:
            before, rules = thought
            answer = form_without_calls
            if reasoning is not None and reasoning.answer:
                header = marker_parts(reasoning.answer, reasoning.tokens, self.ids)
                answer = f"{header} {answer}"
            rules = [*rules, f"answer: {answer}"]
            return self._whole(f"({calls} | answer)", tools, (before, rules))
        if is_strict:
            return self._may_call(conversation)
        return None

    def _calls(self, many: bool) -> str:
        """One call, or with `many` one or more."""
        form = self.form
        calls = "call"
        if many and form.separator is not None:
            calls = f"call ({self._parts(form.separator)} call)*"
        return f"{self._parts(form.opening)} {calls} {self._parts(form.closing)}"

    def _whole(self, answer: str, tools: Sequence[Tool], thought: tuple[str, list[str]]) -> str:
        """The whole grammar: `thought` (the text before the answer, and its rules), then answer."""
        before, rules = thought
        calls = self._call_rules(tools, strict_only=False)
        return "\n".join([f"start: {before} {answer}", *rules, *calls])

    def _may_call(self, conversation: Conversation) -> str:
        form = self.form
        lead, *rest = form.opening or form.begin or ("",)
        if not lead or not form.is_marked:
            raise InvalidRequest(
                "'tools': 'strict' needs 'tool_choice' to be \"required\" or a function's name, "
                "since nothing marks where this model's calls begin",
                "tools",
            )
        again = "*" if conversation.parallel_tool_calls else "?"
        inner = self._parts(rest)
        calls = "call"
        if form.opening:
            many = form.separator is not None and conversation.parallel_tool_calls
            calls = f"call ({self._parts(form.separator or ())} call)*" if many else "call"
        calls = f"{inner} {calls} {self._parts(form.closing)}"
        bare = self._call_rules(conversation.tools, True, with_begin=bool(form.opening))
        token = next((each for each in self.ids if each in lead), None)
        if token is not None:  # text before it belongs to the answer's text
            marker = self._part(lead[lead.index(token) :])
            start = f"start: {ANY_TEXT} ({marker} {calls} {ANY_TEXT}){again}"
            return "\n".join([start, *bare])
        return "\n".join(
            [
                f"start: (lead {calls}){again} TAIL",
                f"lead[suffix={text_part(lead)}]: {ANY_TEXT}",
                f"TAIL: ~/(?s:.*){escaped(lead)}(?s:.*)/",
                *bare,
            ]
        )

    def _call_rules(
        self, tools: Sequence[Tool], strict_only: bool, with_begin: bool = True
    ) -> list[str]:
        """Rule `call`: a call of any tool. `strict_only`: only strict tools constrain arguments."""
        form = self.form
        begin = self._parts(form.begin) if with_begin else ""
        names = " | ".join(f"call_{place}" for place in range(len(tools)))
        rules = [f"call: {begin} ({names}) {self._parts(form.end)}"]
        for place, tool in enumerate(tools):
            schema = tool.schema if tool.strict or not strict_only else {"type": "object"}
            if form.call_rules is not None:
                rules += form.call_rules(f"call_{place}", tool.name, schema, self.ids)
            else:
                rules.append(f"call_{place}: {self._one_call(tool.name, schema)}")
            check_grammar_length(sum(map(len, rules)), "tools")
        return rules

    def _one_call(self, name: str, schema: dict[str, Any]) -> str:
        key = self.form.arguments_key
        if key is None:
            before = f"{self.form.name_part(name)} {self._parts(self.form.middle)}"
            return f"{before} {json_schema_part(schema)}"
        definitions: dict[str, Any] = {
            each: schema[each] for each in ("$defs", "definitions") if each in schema
        }
        return json_schema_part(
            {
                "type": "object",
                "properties": {"name": {"const": name}, key: schema},
                "required": ["name", key],
                "additionalProperties": False,
                **definitions,
            }
        )

    def _parts(self, texts: Sequence[str]) -> str:
        return " ".join(self._part(text) for text in texts)

    def _part(self, text: str) -> str:
        return marked_parts(text, self.ids)
