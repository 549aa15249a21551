"""Answers in gpt-oss's format, Harmony: messages on channels, one after the other.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`: a header
up to `<|message|>`, then the body. The channel `analysis` holds reasoning, and `final` holds the
answer. `commentary` is a call if the header has `to=functions.NAME`, otherwise text for the user
before a call. The prompt ends within the first header, or, where an answer is continued, within its
body. Definition: https://github.com/openai/harmony (`docs/format.md`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from gateway.chat.code_scan import partial_end
from gateway.chat.json_value import JsonValue
from gateway.chat.message_events import (
    ContentText,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallBroken,
    ToolEvent,
)
from gateway.chat.tool_grammar import CallForm
from gateway.chat.tool_parser import CallIds

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
ANSWER = f"{CHANNEL}final{MESSAGE}"
NEXT = f"{START}assistant"
FORM = CallForm(
    begin=(CHANNEL, "commentary to=functions."),
    middle=(" ", CONSTRAIN, "json", MESSAGE),
    arguments_key=None,
    is_whole=True,
)
_ENDS = (END, CALL, RETURN, START)
_HEADERS = (CHANNEL, START, CONSTRAIN, MESSAGE, "to=", "assistant")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_UNUSED_HEADERS = re.compile("(?s).*(?:" + "|".join(map(re.escape, _ENDS)) + ")")
"""Matches a header up to its last marker that ends a message, and so the headers of messages
without a body."""
_MAX_HEADER_CHARS = 1024


class HarmonyParser:
    """Parses one message of a choice, in place of a ToolParser. `tools` are the schemas of the
    tools that may be called, by name. With `is_open`, the text begins within the answer."""

    certain_markers: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        call_ids: CallIds,
        tools: Mapping[str, dict[str, Any]],
        max_held_chars: int = 0,
        is_open: bool = False,
    ) -> None:
        self._call_ids = call_ids
        self._tools = tools
        self._pending = ""
        self._length = 0
        self._in_header = not is_open
        self._channel = "final"
        self._call: JsonValue | None = None
        self._has_arguments = False
        self._num_calls = 0
        self._events: list[ToolEvent] = []

    def begin_at(self, place: int) -> None:
        """Sets how many characters of the model's text come before this parser's input."""
        self._length = place

    def push(self, text: str) -> list[ToolEvent]:
        """The events that are certain after this text."""
        self._length += len(text)
        self._pending += text
        while self._pending and (self._step_header() if self._in_header else self._step_body()):
            pass
        return self._take_events()

    def flush(self, is_cut: bool) -> list[ToolEvent]:
        """The remaining events, at the end of the text; `is_cut` if the token limit ended it."""
        rest, self._pending = self._pending, ""
        if not self._in_header:
            if not is_cut:
                self._add(rest)
            self._end_call(is_cut)
        elif not is_cut and rest.strip() and not any(each in rest for each in MARKERS):
            self._add(rest)
        return self._take_events()

    def _step_header(self) -> bool:
        found = self._pending.find(MESSAGE)
        if found >= 0:
            self._open(_UNUSED_HEADERS.sub("", self._pending[:found]))
            self._pending = self._pending[found + len(MESSAGE) :]
            return True
        text = self._pending.lstrip()
        begins = any(each.startswith(text) or text.startswith(each) for each in _HEADERS)
        if begins and len(text) < _MAX_HEADER_CHARS:
            return False
        self._open("")  # text without a header
        return True

    def _open(self, header: str) -> None:
        """Begins the body of the message with this header."""
        self._in_header = False
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._channel = channel[1] if channel is not None else "final"
        if recipient is None or recipient[1] == "assistant":
            return
        if recipient[1] in self._tools:
            self._call, self._has_arguments = JsonValue(), False
            index = self._num_calls
            self._events.append(ToolCallBegin(index, self._call_ids(index), recipient[1]))
            self._num_calls += 1
        elif self._channel == "commentary":  # a call of a tool that is not there
            self._channel = "analysis"

    def _step_body(self) -> bool:
        """Takes the body up to the marker that ends it, or all text that cannot be part of such a
        marker."""
        ends = {each: self._pending.find(each) for each in _ENDS}
        first = min((at for at in ends.values() if at >= 0), default=None)
        if first is None:
            held = max(partial_end(self._pending, each) for each in _ENDS)
            certain = len(self._pending) - held
            self._take_body(certain)
            return False
        self._take_body(first)
        self._end_call(is_cut=False)
        marker = next(each for each, at in ends.items() if at == first)
        self._pending = self._pending[len(marker) :]
        self._in_header = True
        return True

    def _take_body(self, length: int) -> None:
        text, self._pending = self._pending[:length], self._pending[length:]
        self._add(text)

    def _add(self, text: str) -> None:
        """Adds text of the body; only the pending text has come after it."""
        if not text:
            return
        if self._call is not None:
            if not self._call.broken and not self._call.complete:
                self._call.scan(text, 0)
                self._add_arguments(self._call.take_json())
        elif self._channel == "analysis":
            self._events.append(ReasoningText(text))
        else:
            self._events.append(ContentText(text, self._length - len(self._pending)))

    def _add_arguments(self, text: str) -> None:
        if text:
            self._has_arguments = True
            self._events.append(ToolCallArguments(self._num_calls - 1, text))

    def _end_call(self, is_cut: bool) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        is_whole = call.complete or (not is_cut and call.close())
        self._add_arguments(call.take_json())
        if not self._has_arguments and not call.broken and not is_cut:
            self._add_arguments("{}")
        elif not is_whole:
            self._events.append(ToolCallBroken(self._num_calls - 1))

    def _take_events(self) -> list[ToolEvent]:
        events, self._events = self._events, []
        return events
