"""Fences in an answer's content, the lines between ``` and ```, which may hold its calls.

Models put calls into fences, and examples of calls, too. A fence counts as calls only if it holds
nothing but calls, and only such fences follow in the answer. The text of such fences is held back
until that is known.
"""

from __future__ import annotations

import re
from typing import Protocol

from gateway.chat.message_events import ContentText, ToolCallBegin, ToolEvent

_LANGUAGE = re.compile(r"^[\w+-]+[ \t]+")


class FenceParser(Protocol):
    """A parser of a fence's contents."""

    def push(self, text: str) -> list[ToolEvent]:
        """The events that are certain after this text."""

    def flush(self, is_cut: bool) -> list[ToolEvent]:
        """The remaining events, at the end of the text."""


class FenceLines:
    """The lines after the opening line of a fence, up to the closing line."""

    def __init__(self, opening: str) -> None:
        run = _run_of(opening)
        self._closing = re.compile(rf"[ \t>]*{run[0]}{{{len(run)},}}[ \t\r]*(?=\n|$)")
        self._closing_so_far = re.compile(rf"[ \t>]*{run[0]}*[ \t\r]*")
        self._is_line_start = True

    def take(self, text: str, is_last: bool) -> tuple[int, bool]:
        """How many characters of the text can be read now, one line at most, and whether they close
        the fence. `is_last` says that no text will follow."""
        newline = text.find("\n")
        if self._is_line_start:
            closing = self._closing.match(text)
            if closing is not None and (newline >= 0 or is_last):
                return closing.end(), True
            if newline < 0 and not is_last and self._closing_so_far.fullmatch(text):
                return 0, False
        self._is_line_start = newline >= 0
        return newline + 1 if self._is_line_start else len(text), False


class CodeFences:
    """The fences of one answer. `held` is text that counts as calls if only such text follows,
    otherwise as content; `events` are these calls. `lines` are the lines of the open fence; None
    outside a fence."""

    def __init__(self) -> None:
        self.held = ""
        self.events: list[ToolEvent] = []
        self.lines: FenceLines | None = None
        self._parser: FenceParser | None = None
        self._num_before = 0  # calls in the fences before

    @property
    def may_be_call(self) -> bool:
        """Whether the open fence holds nothing but calls so far."""
        return self._parser is not None

    @property
    def num_calls(self) -> int:
        """The number of calls in closed fences that may count."""
        return sum(isinstance(each, ToolCallBegin) for each in self.events)

    def open(self, opening: str, parser: FenceParser | None) -> None:
        """Open a fence. Without a parser, it holds no calls."""
        self.lines, self._parser = FenceLines(opening), parser
        self._num_before = self.num_calls
        self.held += opening

    def push(self, text: str) -> None:
        """Takes text inside the open fence."""
        self.held += text
        if self._parser is not None:
            self._keep(self._parser.push(text))

    def close(self, closing: str, is_cut: bool = False) -> bool:
        """Close the fence at its closing line, or at the end of the answer. Returns whether it held
        only calls; the token limit may have cut the last one off."""
        self.held += closing
        self.lines = None
        if self._parser is not None:
            self._keep(self._parser.flush(is_cut))
        is_call = self.may_be_call and (is_cut or self.num_calls > self._num_before)
        self._parser = None
        return is_call

    def take_line(self, text: str, parser: FenceParser) -> bool:
        """Take a fence that opens and closes in one line, and may name a language. Returns the
        result of `close`."""
        self.held += text
        self._parser, self._num_before = parser, self.num_calls
        run = _run_of(text)
        self._keep(parser.push(_LANGUAGE.sub("", text[len(run) : -len(run)])))
        return self.close("")

    def release(self) -> str:
        """Return the held text, which is content after all."""
        text, self.held, self.events = self.held, "", []
        return text

    def _keep(self, events: list[ToolEvent]) -> None:
        if any(isinstance(each, ContentText) for each in events):
            self._parser = None
        else:
            self.events += events


def _run_of(opening: str) -> str:
    """The backticks or tildes with which a fence opens."""
    return opening[: len(opening) - len(opening.lstrip(opening[0]))]
