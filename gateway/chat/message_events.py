"""The events of one message, parsed piece by piece from the model's text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

MessageFinish = Literal["stop", "length", "tool_calls"]


class ContentText(msgspec.Struct, frozen=True, gc=False):
    """More of the message's content; `end` is its end in the model's text, in characters."""

    text: str
    end: int = 0


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """More of the model's reasoning before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """A call begins; `index` counts the calls of the message from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More JSON text of the arguments of call `index`, which has begun."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBroken:
    """Call `index` ended with incomplete arguments: they are the beginning of JSON text."""

    index: int


ToolEvent = ContentText | ReasoningText | ToolCallBegin | ToolCallArguments | ToolCallBroken
MessageEvent = ToolEvent


class MessageDelta(msgspec.Struct, frozen=True, gc=False):
    """Events that became known together; `finish` is set on the last delta of a message."""

    events: list[MessageEvent]
    finish: MessageFinish | None = None

    @property
    def only_content(self) -> str | None:
        """The content if the delta holds nothing else, otherwise None."""
        if self.finish is None and len(self.events) == 1:
            (event,) = self.events
            if isinstance(event, ContentText):
                return event.text
        return None

    @property
    def answer_alone(self) -> MessageDelta:
        """This delta without its reasoning."""
        kept: list[MessageEvent] = [
            each for each in self.events if not isinstance(each, ReasoningText)
        ]
        return MessageDelta(kept, self.finish)

    @property
    def content(self) -> str:
        """The content among the events."""
        return "".join([each.text for each in self.events if isinstance(each, ContentText)])

    @property
    def reasoning(self) -> str:
        """The reasoning among the events."""
        return "".join([each.text for each in self.events if isinstance(each, ReasoningText)])


@dataclass(frozen=True, slots=True)
class JoinedCall:
    """Everything in some events about call `index`; `begin` is None if the call began earlier."""

    index: int
    begin: ToolCallBegin | None
    arguments: str


def joined_calls(events: Iterable[MessageEvent]) -> list[JoinedCall]:
    """The calls among the events, each once, in order."""
    begins: dict[int, ToolCallBegin] = {}
    arguments: dict[int, str] = {}
    for event in events:
        if isinstance(event, ToolCallBegin):
            begins[event.index] = event
            arguments.setdefault(event.index, "")
        elif isinstance(event, ToolCallArguments):
            arguments[event.index] = arguments.get(event.index, "") + event.text
    return [JoinedCall(index, begins.get(index), text) for index, text in arguments.items()]
