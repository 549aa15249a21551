"""Tools and tool calls in the format of OpenAI's chat completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from router.api.request_fields import StrictModel
from router.chat.conversation import Tool, ToolCall

MAX_TOOLS = 128
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionFields(StrictModel):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolFields(StrictModel):
    """A tool; functions are the only kind supported."""

    type: Literal["function"]
    function: FunctionFields

    def as_tool(self) -> Tool:
        """The tool as a `Tool`."""
        function = self.function
        strict = bool(function.strict)
        return Tool(function.name, function.description, function.parameters, strict)


class ChosenFunction(StrictModel):
    """The name of the chosen function."""

    name: ToolName


class NamedToolChoice(StrictModel):
    """The choice of one function that must be called."""

    type: Literal["function"]
    function: ChosenFunction


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
    return "<mode>" if isinstance(value, str) else "<named>"
