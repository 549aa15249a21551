"""A conversation in the form that all chat endpoints share, independent of their HTTP bodies.

Endpoints convert their bodies to a `Conversation`; choices are planned from the `Conversation`
alone. This module also builds the input of chat templates, in the form that they expect.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from protocol.errors import InvalidRequest

Role = Literal["system", "developer", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the assistant made earlier; `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str

    def for_template(self, param: str) -> dict[str, Any]:
        """The template's form, with decoded arguments. Raises InvalidRequest naming `param`."""
        try:
            arguments = json.loads(self.arguments or "{}")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise InvalidRequest(
                f"'{param}': the arguments of the call to {self.name!r} are no JSON object", param
            )
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `tool_call_id` names the call that a message of role "tool" answers."""

    role: Role
    content: str
    name: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    def for_template(self, knows_developer_role: bool, param: str) -> dict[str, Any]:
        """The template's form. Raises InvalidRequest naming `param`, the message's position."""
        is_foreign = self.role == "developer" and not knows_developer_role
        message: dict[str, Any] = {
            "role": "system" if is_foreign else self.role,
            "content": self.content,
        }
        if self.name is not None:
            message["name"] = self.name
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                call.for_template(f"{param}.tool_calls") for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is a JSON schema, None for no arguments.

    `strict` says that the arguments of every call must follow the schema.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False

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


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The caller's choice of tools; `name` is set for NAMED only."""

    mode: ToolMode = ToolMode.AUTO
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Everything that decides the prompt and the form of the answer.

    `reasoning_effort` and `template_variables` are passed to the template. `parallel_tool_calls`
    False allows at most one call. With `continue_final_message` the answer continues the last
    message.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    template_variables: dict[str, Any] = field(default_factory=dict)
    documents: tuple[dict[str, Any], ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def __post_init__(self) -> None:
        names = [tool.name for tool in self.tools]
        doubles = sorted({name for name in names if names.count(name) > 1})
        if doubles:
            raise InvalidRequest(f"'tools' names {doubles[0]!r} twice", "tools")
        mode = self.tool_choice.mode
        if mode in (ToolMode.REQUIRED, ToolMode.NAMED) and not self.tools:
            raise InvalidRequest("'tool_choice' needs 'tools'", "tool_choice")
        if mode is ToolMode.NAMED and self.tool_choice.name not in names:
            raise InvalidRequest(
                f"'tool_choice' names {self.tool_choice.name!r}, which is not among 'tools'",
                "tool_choice",
            )

    @property
    def may_call_tools(self) -> bool:
        """Whether the answer may contain calls, so that it is parsed for them."""
        return bool(self.tools) and self.tool_choice.mode is not ToolMode.NONE

    def messages_for_template(self, knows_developer_role: bool) -> list[dict[str, Any]]:
        """The messages in the template's form. Raises InvalidRequest."""
        return [
            message.for_template(knows_developer_role, f"messages[{place}]")
            for place, message in enumerate(self.messages)
        ]
