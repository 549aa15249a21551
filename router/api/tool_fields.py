"""Tools and tool calls in the format of OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from protocol.errors import InvalidRequest
from router.api.strict_model import LeftOut, StrictModel, first_error
from router.chat.conversation import Tool, ToolCall

MAX_TOOLS = 128
Hint = Annotated[Any, Field(description="Accepted, and changes nothing.")]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionFields(StrictModel):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def as_tool(self) -> Tool:
        """The function as a `Tool`."""
        return Tool(self.name, self.description, self.parameters, bool(self.strict))


class FunctionTool(StrictModel):
    """A function as a tool."""

    type: Literal["function"] = "function"
    function: FunctionFields
    cache_control: Hint = None

    def as_tool(self) -> Tool:
        """The tool as a `Tool`."""
        return self.function.as_tool()


def kind_of(value: Any, usual: str) -> str:
    """Tag of the union branch that an entry belongs to: one of the `usual` type, which it need not
    name, or one of a kind that is left out."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    is_other = isinstance(value, LeftOut) or (isinstance(kind, str) and kind != usual)
    return "<left out>" if is_other else "<usual>"


ToolFields = Annotated[
    Annotated[FunctionTool, Tag("<usual>")] | Annotated[LeftOut, Tag("<left out>")],
    Discriminator(lambda value: kind_of(value, "function")),
]


def functions_of(tools: Iterable[FunctionTool | LeftOut] | None) -> tuple[Tool, ...]:
    """The tools that are functions."""
    return tuple(each.as_tool() for each in tools or () if isinstance(each, FunctionTool))


class ChosenFunction(StrictModel):
    """The name of the chosen function."""

    name: ToolName


class NamedToolChoice(StrictModel):
    """The choice of one function that must be called."""

    type: Literal["function"] = "function"
    function: ChosenFunction


class AllowedTools(StrictModel):
    """Some of the tools, of which one may or must be called; the model sees no others."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], Field(min_length=1, max_length=MAX_TOOLS), first_error]


class AllowedToolsChoice(StrictModel):
    """The choice of some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class CalledFunction(StrictModel):
    """A function and the JSON text of its arguments.

    `parsed_arguments` is ignored: OpenAI's client adds its parsed form of `arguments`.
    """

    name: str
    arguments: str
    parsed_arguments: Any = None


class MessageToolCall(StrictModel):
    """A call in an earlier assistant message; clients may send back the `index` of a stream."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def as_call(self) -> ToolCall:
        """The call as a `ToolCall`."""
        return ToolCall(self.id, self.function.name, self.function.arguments)


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
