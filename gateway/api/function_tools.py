"""Tools and tool calls in the format of OpenAI's chat completions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from gateway.api.strict_model import StrictModel, first_error
from gateway.api.union_branches import LEFT_OUT, OBJECT, TEXT, LeftOut, by_shape, by_type, null_as
from gateway.chat.conversation import Tool, ToolCall
from protocol.errors import InvalidRequest

MAX_TOOLS = 128
NONE = "{}"
"""The text of no arguments."""
Hint = Annotated[Any, Field(description="Accepted, and changes nothing.")]
FunctionType = Annotated[Literal["function"], null_as("function")]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class FunctionFields(StrictModel):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def as_tool(self, param: str) -> Tool:
        """The function of the field `param` as a `Tool`."""
        schema = f"{param}.parameters"
        return Tool(self.name, self.description, self.parameters, bool(self.strict), schema)


class FunctionTool(StrictModel):
    """A function as a tool."""

    type: FunctionType = "function"
    function: FunctionFields
    cache_control: Hint = None


class OtherTool(LeftOut):
    """A tool of another kind than a function."""

    usual = ("function",)


ToolFields = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[OtherTool, LEFT_OUT],
    by_type("function", usual="function", others=LEFT_OUT),
]


def functions_of(tools: Iterable[FunctionTool | LeftOut] | None) -> tuple[Tool, ...]:
    """The tools that are functions."""
    return tuple(
        each.function.as_tool(f"tools[{place}].function")
        for place, each in enumerate(tools or ())
        if isinstance(each, FunctionTool)
    )


class ChosenFunction(StrictModel):
    """The name of the chosen function."""

    name: ToolName


class NamedToolChoice(StrictModel):
    """The choice of one function that must be called."""

    type: FunctionType = "function"
    function: ChosenFunction


class AllowedTools(StrictModel):
    """Some of the tools, of which one may or must be called; the model sees no others."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], Field(min_length=1, max_length=MAX_TOOLS), first_error]


class AllowedToolsChoice(StrictModel):
    """The choice of some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Arguments = Annotated[
    Annotated[str, TEXT] | Annotated[dict[str, Any], OBJECT], by_shape(str, dict), null_as(NONE)
]
"""The arguments of an earlier call: JSON text, or the object, as clients of other APIs keep it.
Without any, some clients keep nothing or null."""


def text_of(arguments: str | dict[str, Any]) -> str:
    """The arguments as JSON text."""
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments, ensure_ascii=False)


class CalledFunction(StrictModel):
    """A function and its arguments.

    `parsed_arguments` is ignored: OpenAI's client adds its parsed form of `arguments`.
    """

    name: str
    arguments: Arguments = NONE
    parsed_arguments: Any = None

    def as_call(self, call_id: str) -> ToolCall:
        """The call as a `ToolCall`."""
        return ToolCall(call_id, self.name, text_of(self.arguments))


class FunctionCallFields(StrictModel):
    """A call in an earlier assistant message; clients may send back the `index` of a stream. A
    client that keeps no ids sends none, or null."""

    id: str | None = None
    type: FunctionType = "function"
    function: CalledFunction
    index: int | None = None

    def as_call(self, made_id: str) -> ToolCall:
        """The call as a `ToolCall`, which has the id `made_id` if it has none of its own."""
        return self.function.as_call(self.id or made_id)


class CalledCustomTool(StrictModel):
    """A custom tool and the text that it was given."""

    name: str
    input: str


class CustomCallFields(StrictModel):
    """A call of a custom tool, in an earlier message of another server's assistant."""

    id: str | None = None
    type: Literal["custom"]
    custom: CalledCustomTool
    index: int | None = None

    def as_call(self, made_id: str) -> ToolCall:
        """The call as a `ToolCall`, which has the id `made_id` if it has none of its own."""
        return custom_call(self.id or made_id, self.custom.name, self.custom.input)


MessageToolCall = Annotated[
    Annotated[FunctionCallFields, Tag("<function>")] | Annotated[CustomCallFields, Tag("<custom>")],
    by_type("function", "custom", usual="function"),
]


def custom_call(call_id: str, name: str, given: str) -> ToolCall:
    """A call of a custom tool, whose text is its only argument."""
    return ToolCall(call_id, name, json.dumps({"input": given}, ensure_ascii=False))


def tool_choice_shape(value: Any) -> str:
    """Tag of the union branch that a value belongs to."""
    if isinstance(value, str):
        return "<mode>"
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return "<allowed>" if kind == "allowed_tools" else "<named>"


def only_allowed(tools: tuple[Tool, ...], names: Iterable[str]) -> tuple[Tool, ...]:
    """The tools with these names. Raises InvalidRequest for a name that none of them has."""
    allowed = set(names)
    missing = allowed.difference(tool.name for tool in tools)
    if missing:
        raise InvalidRequest(
            f"'tool_choice' names {min(missing)!r}, which is not among 'tools'", "tool_choice"
        )
    return tuple(tool for tool in tools if tool.name in allowed)
