"""A conversation in the form that all chat endpoints share, independent of their HTTP bodies.

Endpoints convert their bodies to a `Conversation`; choices are planned from the `Conversation`
alone. This module also builds the input of chat templates, in the form that they expect.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from gateway.chat.past_calls import arguments_object, arguments_text, short_call_id, with_literals
from gateway.text.template_shape import TemplateShape, reasoning_part, text_part
from protocol.errors import InvalidRequest

Role = Literal["system", "developer", "user", "assistant", "tool"]


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the assistant made earlier; `arguments` is the text of a JSON object, or what a
    model wrote in place of one."""

    id: str
    name: str
    arguments: str

    def for_template(self, shape: TemplateShape, param: str) -> dict[str, Any]:
        """The form in which a template of this shape takes it. Raises InvalidRequest naming
        `param`."""
        arguments: Any
        if shape.arguments_as_text:
            arguments = arguments_text(self.arguments, param)
        elif shape.unquoted_arguments:
            arguments = with_literals(arguments_object(self.arguments, param))
        else:
            arguments = arguments_object(self.arguments, param)
        function = {"name": self.name, "arguments": arguments}
        call_id = short_call_id(self.id) if shape.short_call_ids else self.id
        return {"id": call_id, "type": "function", "function": function}


class Message(msgspec.Struct, frozen=True):
    """One message. `tool_call_id` names the call that a message of role "tool" answers. `parts`:
    the parts of a content that came in several."""

    role: Role
    content: str
    name: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    parts: tuple[str, ...] = ()

    def for_template(self, shape: TemplateShape, calls_param: str) -> dict[str, Any]:
        """The form in which a template of this shape takes it. Raises InvalidRequest naming
        `calls_param`, the field of the message's calls."""
        is_foreign = self.role == "developer" and not shape.knows_developer_role
        role = "system" if is_foreign else self.role
        message: dict[str, Any] = {"role": role, "content": self._content_for(role, shape)}
        if self.name is not None:
            message["name"] = self.name
        if self.reasoning is not None and not shape.reasoning_in_parts:
            message |= dict.fromkeys(shape.reasoning_names, self.reasoning)
        if self.tool_calls:
            message["tool_calls"] = [
                call.for_template(shape, calls_param) for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            call_id = self.tool_call_id
            message["tool_call_id"] = short_call_id(call_id) if shape.short_call_ids else call_id
        return message

    def _content_for(self, role: str, shape: TemplateShape) -> str | list[dict[str, str]]:
        thoughts = []
        if self.reasoning is not None and self.role == "assistant" and shape.reasoning_in_parts:
            thoughts = [reasoning_part(self.reasoning)]
        is_empty = role == "assistant" and not self.content and not self.tool_calls
        is_in_parts = bool(self.parts) and role in shape.part_roles
        if not (
            is_in_parts
            or thoughts
            or role in shape.only_part_roles
            or (is_empty and shape.needs_parts_if_empty)
        ):
            return self.content
        texts = self.parts if is_in_parts else (self.content,)
        return [*thoughts, *map(text_part, texts)]


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may call. `parameters` is a JSON schema, None for no arguments.

    `strict` says that the arguments of every call must follow the schema. `param` is the caller's
    field that holds the schema, for errors.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False
    param: str = "tools"

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the arguments."""
        return self.parameters or {"type": "object", "properties": {}}

    def for_template(self) -> dict[str, Any]:
        """The template's form, which is OpenAI's."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.schema
        return {"type": "function", "function": function}


class ToolMode(StrEnum):
    """Whether the answer calls tools: the model decides, never, at least one, or a named one."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


class ToolChoice(msgspec.Struct, frozen=True):
    """The caller's choice of tools; `name` is set for NAMED only."""

    mode: ToolMode = ToolMode.AUTO
    name: str | None = None


class FieldNames(msgspec.Struct, frozen=True):
    """The names of the caller's own fields, for errors. `is_chat`: messages are the caller's own,
    as in OpenAI's chat format, so an error can name the message."""

    messages: str = "messages"
    effort: str = "reasoning_effort"
    prefill: str = "continue_final_message"
    is_chat: bool = True

    def calls(self, place: int) -> str:
        """The field that holds the calls of the message at this place."""
        return f"messages[{place}].tool_calls" if self.is_chat else self.messages


class Conversation(msgspec.Struct, frozen=True):
    """All input that determines the prompt and the form of the answer.

    `reasoning_effort` and `template_variables` are passed to the template. `parallel_tool_calls`
    False allows at most one call. With `continue_final_message` the answer continues the last
    message.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    template_variables: dict[str, Any] = {}
    documents: tuple[dict[str, Any], ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    names: FieldNames = FieldNames()

    def __post_init__(self) -> None:
        mode = self.tool_choice.mode
        if not self.tools:
            if mode in (ToolMode.REQUIRED, ToolMode.NAMED):
                raise InvalidRequest("'tool_choice' needs 'tools'", "tool_choice")
            return
        names = [tool.name for tool in self.tools]
        doubles = sorted({name for name in names if names.count(name) > 1})
        if doubles:
            raise InvalidRequest(f"'tools' names {doubles[0]!r} twice", "tools")
        if mode is ToolMode.NAMED and self.tool_choice.name not in names:
            raise InvalidRequest(
                f"'tool_choice' names {self.tool_choice.name!r}, which is not among 'tools'",
                "tool_choice",
            )

    @property
    def may_call_tools(self) -> bool:
        """Whether the answer may contain calls, so that it is parsed for them."""
        return bool(self.tools) and self.tool_choice.mode is not ToolMode.NONE

    @property
    def prefill(self) -> str:
        """The beginning of the answer, if it continues the last message."""
        return self.messages[-1].content if self.continue_final_message else ""

    def messages_for_template(self, shape: TemplateShape) -> list[dict[str, Any]]:
        """The messages in the form that a template of this shape takes. Raises InvalidRequest."""
        places = enumerate(self.messages)
        return [
            message.for_template(shape, self.names.calls(place))
            for place, message in (_single_calls(self.messages) if shape.single_calls else places)
        ]


def _single_calls(messages: Sequence[Message]) -> Iterator[tuple[int, Message]]:
    """The messages and their places. A message with several calls becomes one message for each
    call, followed by that call's results."""
    place = 0
    while place < len(messages):
        message, calls = messages[place], messages[place].tool_calls
        if len(calls) < 2:
            yield place, message
            place += 1
            continue
        end = place + 1
        while end < len(messages) and messages[end].role == "tool":
            end += 1
        results: dict[str | None, list[tuple[int, Message]]] = {}
        for at in range(place + 1, end):
            results.setdefault(messages[at].tool_call_id, []).append((at, messages[at]))
        for call in calls:
            yield place, replace(message, tool_calls=(call,))
            yield from results.pop(call.id, ())
            message = Message("assistant", "")
        for unknown in results.values():
            yield from unknown
        place = end
