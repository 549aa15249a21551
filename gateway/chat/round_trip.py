"""Which format of calls a chat template speaks, decided by a round trip.

A known call is rendered in the history of a conversation. A format fits if its parser reads the
same call back from what the template wrote, and nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from gateway.chat.conversation import Message, Tool, ToolCall
from gateway.chat.message_events import joined_calls
from gateway.chat.message_parser import MessageParser
from gateway.chat.past_calls import arguments_object
from gateway.chat.reasoning_parser import ReasoningMarkers, ReasoningParser
from gateway.chat.tool_parser import CallParser
from gateway.output.output_text import TextDelta
from gateway.text.chat_template import ChatTemplate
from protocol.errors import InvalidRequest
from protocol.messages import FinishReason

NAME = "probe_call"
CITY = "Probetown"
ARGUMENTS = {"city": CITY, "days": 2, "tags": ["a b", "c"]}
TOOL = Tool(
    NAME,
    "A probe.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Which."},
            "days": {"type": "integer", "description": "How many."},
            "tags": {"type": "array", "items": {"type": "string"}, "description": "More."},
        },
        "required": ["city"],
    },
)
_CALL_ID = "call12345"
_USER = Message("user", "probe")
_ANSWER = Message(
    "assistant",
    "",
    tool_calls=(ToolCall(_CALL_ID, NAME, json.dumps(ARGUMENTS, ensure_ascii=False)),),
)
_RESULT = Message("tool", "probe", NAME, tool_call_id=_CALL_ID)
_SEAM = re.compile(r"[\s>\]]")


class WrittenCall:
    """A call as a template writes it: `text`, which follows `prompt`."""

    def __init__(self, prompt: str, text: str) -> None:
        self.prompt = prompt
        self.text = text

    def is_sketched_by(self, sketch: re.Pattern[str] | None) -> bool:
        """Whether the text matches a family's `sketch`, the outline of its calls. The form of the
        values does not matter."""
        return sketch is not None and sketch.fullmatch(self.text.strip()) is not None

    def is_read_by(self, tools: CallParser, lead: str, reasoning: ReasoningMarkers | None) -> bool:
        """Whether a new parser reads the call back, and nothing else. Behind any reasoning, the
        text must begin with `lead`."""
        text = self.text
        if reasoning is not None:
            thoughts = ReasoningParser(reasoning, reasoning.is_open(self.prompt))
            text = thoughts.push(text)[1] + thoughts.flush(is_cut=False)[1]
        if not text.lstrip().startswith(lead):
            return False
        parser = MessageParser(tools=tools)
        message = parser.push(TextDelta(text, [], finish=FinishReason.STOP))
        calls = joined_calls(message.events)
        if message.content.strip() or message.finish != "tool_calls" or len(calls) != 1:
            return False
        (call,) = calls
        return (
            call.begin is not None
            and call.begin.name == NAME
            and _is_same(arguments_object(call.arguments, "tools"))
        )


def written_call(
    template: ChatTemplate, control_texts: Collection[str], reasoning: ReasoningMarkers | None
) -> WrittenCall | None:
    """The call as the template writes it, without the tokens that end a message; None if it
    writes none."""
    prompt = _render(template, [_USER], add_generation_prompt=True)
    whole = _render(template, [_USER, _ANSWER])
    if CITY not in whole:  # the template may also need the result
        whole = _render(template, [_USER, _ANSWER, _RESULT])
    if not prompt or CITY not in whole:
        return None
    start = len(prompt)
    if not whole.startswith(prompt):
        start = _after_question(prompt, whole) or _start_of_answer(prompt, whole, reasoning)
    return WrittenCall(whole[:start], _up_to_end(whole[start:], control_texts))


def _render(
    template: ChatTemplate, messages: list[Message], add_generation_prompt: bool = False
) -> str:
    """The rendered text; empty if the template refuses the messages."""
    given = [message.for_template(template.shape(has_tools=True), "tools") for message in messages]
    try:
        return template.render(given, add_generation_prompt, tools=[TOOL.for_template()])
    except InvalidRequest:
        return ""


def _after_question(prompt: str, whole: str) -> int | None:
    """The position where the answer begins in `whole`, if the text after the user's message is
    the same as in `prompt`; otherwise None. A template may write more before the last message of a
    conversation."""
    ending = prompt[prompt.rfind(_USER.content) :]
    start = whole.rfind(ending, 0, whole.index(CITY))
    return start + len(ending) if start >= 0 else None


def _start_of_answer(prompt: str, whole: str, reasoning: ReasoningMarkers | None) -> int:
    """Where the answer begins in `whole` if the prompt opens it differently: with reasoning, which
    it may close at once, or with a marker that begins like the answer's."""
    if reasoning is not None:
        prompt = prompt.rstrip().removesuffix(reasoning.end).rstrip().removesuffix(reasoning.begin)
    shared = _num_shared(prompt, whole)
    if shared == len(prompt):
        return shared
    return max((found.end() for found in _SEAM.finditer(whole, 0, shared)), default=shared)


def _num_shared(first: str, second: str) -> int:
    """How many characters two texts share at their beginnings."""
    pairs = zip(first, second, strict=False)
    differences = (place for place, (one, other) in enumerate(pairs) if one != other)
    return next(differences, min(len(first), len(second)))


def _up_to_end(text: str, control_texts: Collection[str]) -> str:
    """The text up to the first control token after the call's first argument."""
    first = text.index(CITY)
    ends = [end for end in (text.find(each, first) for each in control_texts) if end >= 0]
    return text[: min(ends, default=len(text))]


def _is_same(arguments: dict[str, Any]) -> bool:
    """Whether these are the probe's arguments. Some templates write all values as text."""
    return arguments.keys() == ARGUMENTS.keys() and all(
        arguments[key] == value or arguments[key] == str(value) for key, value in ARGUMENTS.items()
    )
