"""Grammars of calls in tags.

Arguments come in the order of the schema's properties; required ones are always present. Values
that are listed by a schema (`enum`, `const`) are the only ones admitted; other text is any text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gateway.chat.formats.keyword_grammar import arguments_of
from gateway.chat.formats.tag_values import (
    TEXT,
    Kinds,
    choices_of_arguments,
    is_text_or_scalar,
    kinds_of_arguments,
)
from gateway.chat.thought_grammar import escaped, marked_parts
from gateway.grammars.grammar import check_grammar_length, json_schema_part, text_part
from http_kit.errors import MAX_PARAM_CHARS, shortened
from protocol.errors import InvalidRequest

_MAX_KEY_CHARS = 128
_DEFINITIONS = ("$defs", "definitions")
ArgumentTag = Callable[[str, bool], str]
"""The text before the value, given the argument's name and whether the value is text."""


class _Argument(NamedTuple):
    """An argument, with the definitions to which its schema may refer."""

    key: str
    schema: dict[str, Any] | bool
    kinds: Kinds | None
    choices: list[Any] | None


@dataclass(frozen=True, slots=True)
class TagForm:
    """How a family writes a call: `call`, with the name in it, arguments, `call_end`.

    An argument is `argument`, `before_value`, the value, `value_end`. `gap` is a part of a grammar
    that stands behind `call`, in front of `before_value`, and behind an argument and `call_end`.
    `tells_kinds`: the tag says whether a value is text. `not_in_keys`: characters that end an
    argument's name.
    """

    call: str
    argument: ArgumentTag
    value_end: str
    call_end: str
    before_value: str = ""
    gap: str = ""
    tells_kinds: bool = False
    not_in_keys: str = "<>\n"

    def __call__(
        self, rule: str, name: str, schema: dict[str, Any], ids: Mapping[str, int]
    ) -> list[str]:
        """The rules for one call, of which the first is named `rule`; see `CallRules`.

        Raises InvalidRequest for names that no tag can hold, and for rules that are too long.
        """
        properties, required = arguments_of(schema)
        definitions = {each: schema[each] for each in _DEFINITIONS if each in schema}
        kinds, choices = kinds_of_arguments(schema), choices_of_arguments(schema)
        parts, rules = [marked_parts(self.call.format(name=name), ids), self.gap], []
        num_chars = 0
        for place, (key, wanted) in enumerate(properties.items()):
            if not self._can_write(key):
                shown = shortened(key, MAX_PARAM_CHARS)
                raise InvalidRequest(
                    f"'tools': {shown!r}, an argument of {name!r}, cannot be written by this model",
                    "tools",
                )
            whole: dict[str, Any] | bool = True
            if isinstance(wanted, dict):
                whole = wanted | definitions
            argument = _Argument(key, whole, kinds.get(key), choices.get(key))
            part = f"{rule}_argument_{place}"
            added = self._argument_rules(part, argument, ids)
            num_chars += sum(map(len, added))
            check_grammar_length(num_chars, "tools")
            rules += added
            parts.append(part if key in required else f"{part}?")
        parts += [marked_parts(self.call_end, ids), self.gap]
        return [f"{rule}: {' '.join(filter(None, parts))}", *rules]

    def _can_write(self, key: str) -> bool:
        is_whole = key == key.strip() and not set(key) & set(self.not_in_keys)
        return is_whole and 0 < len(key) <= _MAX_KEY_CHARS

    def _argument_rules(self, rule: str, argument: _Argument, ids: Mapping[str, int]) -> list[str]:
        key, schema, kinds, choices = argument
        before_text, before_json = (self._before(key, is_text, ids) for is_text in (True, False))
        end = marked_parts(self.value_end, ids)
        ways, more = [], []
        if choices:
            texts = [each for each in choices if isinstance(each, str)]
            others = [_json(each) for each in choices if not isinstance(each, str)]
            for before, values in ((before_text, texts), (before_json, others)):
                if values:
                    ways.append(f"{before} ({' | '.join(map(text_part, values))}) {end}")
        else:
            is_text = kinds is None or is_text_or_scalar(kinds)
            if is_text or (self.tells_kinds and "string" in (kinds or ())):
                ways.append(f"{before_text} {rule}_text")
                more.append(self._text_rule(f"{rule}_text", ids))
            if not is_text or (self.tells_kinds and kinds != TEXT):
                ways.append(f"{before_json} {json_schema_part(schema)} {end}")
        gap = f" {self.gap}" if self.gap else ""
        return [f"{rule}: ({' | '.join(ways)}){gap}", *more]

    def _before(self, key: str, is_text: bool, ids: Mapping[str, int]) -> str:
        parts = [marked_parts(self.argument(key, is_text), ids)]
        if self.before_value:
            parts += [self.gap, marked_parts(self.before_value, ids)]
        return " ".join(filter(None, parts))

    def _text_rule(self, rule: str, ids: Mapping[str, int]) -> str:
        """Any text and the end of the value."""
        token = next((each for each in ids if each in self.value_end), None)
        if token is None:
            return f"{rule}[suffix={text_part(self.value_end)}]: /(?s:.*)/"
        before, _, after = self.value_end.partition(token)
        return f"{rule}: /(?s:.*){escaped(before)}/ {marked_parts(token + after, ids)}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
