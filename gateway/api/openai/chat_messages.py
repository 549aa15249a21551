"""The messages of `/v1/chat/completions`, as OpenAI's clients and others write them.

An assistant's message or a tool result may be empty; a question may not. The model reads text
alone: other parts are refused by name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from typing import Annotated, Any, Literal

from msgspec.structs import replace
from pydantic import Tag

from gateway.api.function_tools import CalledFunction, Hint, MessageToolCall
from gateway.api.strict_model import StrictModel, bounded
from gateway.api.union_branches import LIST, REFUSED, TEXT, TEXT_OR_LIST, Refused, by_type
from gateway.api.unknown_fields.ignorable_fields import ignorable
from gateway.chat.conversation import Message
from protocol.errors import InvalidRequest

_ASKING_ROLES = ("system", "developer", "user")


class TextPart(StrictModel):
    """A text part of a message's content, named as here or as in `/v1/responses`."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    cache_control: Hint = None


class RefusalPart(StrictModel):
    """An earlier refusal to answer; the model sees it as text."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """The text of the refusal."""
        return self.refusal


class ThinkingPart(StrictModel):
    """A piece of the assistant's earlier reasoning, as Mistral's clients write it."""

    type: Literal["thinking"]
    thinking: Annotated[
        Annotated[str, TEXT] | Annotated[list[TextPart], bounded, LIST], TEXT_OR_LIST
    ]

    @property
    def thought(self) -> str:
        """The reasoning."""
        given = self.thinking
        return given if isinstance(given, str) else "".join(part.text for part in given)


_Part = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[ThinkingPart, Tag("<thinking>")]
    | Annotated[Refused, REFUSED],
    by_type(
        "refusal",
        "thinking",
        usual="text",
        others=REFUSED,
        same={"text": ("text", "input_text", "output_text")},
    ),
]
_Content = Annotated[
    Annotated[str, TEXT] | Annotated[list[_Part], bounded, LIST],
    TEXT_OR_LIST,
]


class ChatMessage(StrictModel):
    """One message; the template also sees `name`, `tool_call_id` and `reasoning_content`.

    `reasoning` is vLLM's name for `reasoning_content`. `parsed` is ignored: OpenAI's client adds
    its parsed form of an answer's content, and sends it back with the answer. A `refusal` is text
    of the assistant. `prefix` (Mistral, DeepSeek) and `partial` (Moonshot) ask the model to
    continue the message.
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: _Content | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[MessageToolCall], bounded] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    parsed: Any = None
    refusal: str | None = None
    audio: Annotated[Any, ignorable()] = None
    annotations: Annotated[Any, ignorable([])] = None
    function_call: CalledFunction | None = None
    cache_control: Hint = None
    prefix: bool | None = None
    partial: bool | None = None

    @property
    def open_by(self) -> str | None:
        """The field that asks the model to continue this message."""
        return "prefix" if self.prefix else "partial" if self.partial else None

    def as_message(self, place: int) -> Message:
        """Convert to a `Message`. It has the content as one text, with a line for each text part,
        and as parts. Raises InvalidRequest."""
        param = f"messages[{place}]"
        calls = tuple(
            [
                call.as_call(_made_id(place, index))
                for index, call in enumerate(self.tool_calls or ())
            ]
        )
        if self.function_call is not None:
            calls = (*calls, self.function_call.as_call(_made_id(place)))
        if calls and self.role != "assistant":
            param = f"{param}.tool_calls"
            raise InvalidRequest(f"only an assistant's message may have '{param}'", param)
        text, parts = self._text(param)
        thoughts = self.reasoning if self.reasoning_content is None else self.reasoning_content
        if thoughts is None and isinstance(self.content, list):
            found = [each.thought for each in self.content if isinstance(each, ThinkingPart)]
            thoughts = "\n".join(found) if found else None
        if self.role == "function":
            return Message("tool", text, self.name)
        return Message(self.role, text, self.name, thoughts, calls, self.tool_call_id, parts)

    def _text(self, param: str) -> tuple[str, tuple[str, ...]]:
        """The content as one text, and as parts if there are several. An answer may be empty, and
        so may a result. Raises InvalidRequest."""
        content = self.content
        if not content and self.role in _ASKING_ROLES and not isinstance(content, str):
            what = "is required" if content is None else "must not be empty"
            raise InvalidRequest(f"'{param}.content' {what}", f"{param}.content")
        if self.refusal is None and isinstance(content, str):
            return content, ()
        if self.refusal is not None and self.role != "assistant":
            raise InvalidRequest(
                f"only an assistant's message may have '{param}.refusal'", f"{param}.refusal"
            )
        if isinstance(content, str):
            texts = [content]
        else:
            texts = [part.text for part in content or () if not isinstance(part, ThinkingPart)]
        if self.refusal is not None:
            texts = [*filter(None, texts), self.refusal]
        return "\n".join(texts), tuple(texts) if len(texts) > 1 else ()


def continues_last(
    messages: Sequence[ChatMessage], asks: bool | None, begins_another: bool | None
) -> bool:
    """Whether the model continues the last message: a field of the body `asks` for it, or one of
    the message. Raises InvalidRequest if another message has such a field, or if the body also asks
    the model to begin another message."""
    for place, each in enumerate(messages):
        if each.open_by and (each is not messages[-1] or each.role != "assistant"):
            param = f"messages[{place}].{each.open_by}"
            raise InvalidRequest(
                f"'{param}': the model can only continue the last message, the assistant's", param
            )
    last = messages[-1].open_by
    param = "continue_final_message" if asks else f"messages[{len(messages) - 1}].{last}"
    if (asks or last) and begins_another:
        raise InvalidRequest(f"'{param}' and 'add_generation_prompt' exclude each other", param)
    return bool(asks or last)


def messages_of(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """The messages of a conversation. A result without an id gets the id of its call. For a legacy
    `function_call` that is the call before it, otherwise the first call without a result. Raises
    InvalidRequest."""
    made: list[Message] = []
    called: deque[str] = deque()
    answered: set[str] = set()
    call_place = 0
    for place, each in enumerate(messages):
        message = each.as_message(place)
        if each.role == "function":
            message = replace(message, tool_call_id=_made_id(call_place))
        elif each.function_call is not None:
            call_place = place
        elif message.tool_calls:
            called = deque(call.id for call in message.tool_calls)
        elif message.tool_call_id:
            answered.add(message.tool_call_id)
        elif each.role == "tool" and (call_id := _first_without_result(called, answered)):
            message = replace(message, tool_call_id=call_id)
        made.append(message)
    return tuple(made)


def _first_without_result(called: deque[str], answered: Container[str]) -> str | None:
    """Take the first call that is not answered."""
    while called:
        call_id = called.popleft()
        if call_id not in answered:
            return call_id
    return None


def _made_id(place: int, index: int = 0) -> str:
    """An id for a call that has none. For a message's first call it has nine characters, as
    Mistral's templates require."""
    return f"call{place:05}{index or ''}"
