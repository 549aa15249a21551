"""Keeps control tokens that users write in their messages from becoming tokens.

Before a template is rendered, each look-alike of a control token in the messages gets a mark after
its first character. The mark is a character that occurs nowhere else. The prompt is then cut at the
marks, and its parts are encoded one by one, so that no look-alike is ever whole. The template's own
control tokens are not touched, nor is any text without look-alikes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from protocol.errors import InvalidRequest

_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # noncharacters: for internal use only
_SHAPE = re.compile(r"<[|｜][^\s<>]+[|｜]>")
_LEAST_CHARS = 2


def is_control(text: str, is_special: bool) -> bool:
    """Whether an added token controls the model: it is special, or looks like one."""
    return len(text) >= _LEAST_CHARS and (is_special or _SHAPE.fullmatch(text) is not None)


class ControlTokens:
    """The control tokens of a tokenizer, as texts. `starts` has the first character of each."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(texts)
        self.starts = sorted({text[0] for text in self.texts})
        self._pattern = re.compile(_trie_pattern(self.texts)) if self.texts else None

    def without(self, texts: Iterable[str]) -> ControlTokens:
        """The control tokens except the given ones."""
        return ControlTokens(self.texts.difference(texts))

    def are_in(self, value: Any) -> bool:
        """Whether a text contains a control token; for a list or an object, whether any text in the
        list or object does."""
        if isinstance(value, str):
            return self._find(value, 0) is not None
        return any(self._find(text, 0) is not None for text in _texts_of(value))

    def places(self, text: str) -> list[int]:
        """The positions where control tokens begin in a text, without those that overlap an
        earlier one."""
        if self._pattern is None or self._find(text, 0) is None:
            return []
        return [found.start() for found in self._pattern.finditer(text)]

    def marked(self, value: Any, mark: str) -> Any:
        """A copy of the text, list or object with a mark in each control token."""
        if isinstance(value, str):
            return self._marked_text(value, mark)
        if isinstance(value, dict):
            return {
                self._marked_text(key, mark): self.marked(each, mark) for key, each in value.items()
            }
        if isinstance(value, list):
            return [self.marked(each, mark) for each in value]
        return value

    def _marked_text(self, text: str, mark: str) -> str:
        parts, place = [], 0
        start = self._find(text, 0)
        while start is not None:
            parts.append(text[place : start + 1])
            place = start + 1
            start = self._find(text, place)
        return mark.join([*parts, text[place:]])

    def _find(self, text: str, start: int) -> int | None:
        """The position of the first control token at or after `start`; None if there is none."""
        for each in self.starts:
            if each in text:
                break
        else:
            return None
        assert self._pattern is not None, "a tokenizer with `starts` has a pattern"
        found = self._pattern.search(text, start)
        return None if found is None else found.start()


def free_mark(*values: Any) -> str:
    """A character that no text in the values contains, neither as itself nor as a JSON escape.
    Raises InvalidRequest if the texts contain all possible marks."""
    left = set(_MARKS)
    for value in values:
        for text in _texts_of(value):
            if not text.isascii():
                left.difference_update(text)
            if "\\ufd" in text:
                left.difference_update(mark for mark in _MARKS if _escaped(mark) in text)
    if not left:
        raise InvalidRequest("'messages' use all noncharacters of Unicode", "messages")
    return min(left)


def split_at_marks(text: str, mark: str) -> list[str]:
    """The parts of a rendered prompt between the marks. Marks count in their escaped form, too:
    a template may write its input as ASCII-only JSON or Python."""
    return text.replace(_escaped(mark), mark).split(mark)


def _escaped(mark: str) -> str:
    return json.dumps(mark)[1:-1]


def _texts_of(value: Any) -> Iterator[str]:
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, dict):
            yield from part
            waiting.extend(part.values())
        elif isinstance(part, list | tuple):
            waiting.extend(part)


def _trie_pattern(texts: Iterable[str]) -> str:
    """A regular expression that matches any of the texts. Matching reads no character twice, even
    if many texts have the same beginning."""
    trie: dict[str, Any] = {}
    for text in texts:
        node = trie
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return _pattern_of(trie)


def _pattern_of(trie: dict[str, Any]) -> str:
    if "" in trie:  # a text ends here; the shortest match is enough
        return ""
    branches = []
    for character, node in sorted(trie.items()):
        tail = re.escape(character)
        while len(node) == 1 and "" not in node:
            ((character, node),) = node.items()
            tail += re.escape(character)
        branches.append(tail + _pattern_of(node))
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
