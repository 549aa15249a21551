"""The items of a conversation, as requests have them and as they are kept.

The model reads text. Calls of custom tools, shells and the like become calls of functions. So do
calls that another service ran, if the item holds their result. Images and files are refused by
name. Items without anything to read (encrypted summaries, searches without results) are left out
and named.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag

from gateway.api.function_tools import NONE, Arguments, custom_call, text_of
from gateway.api.openai.chat_messages import RefusalPart
from gateway.api.strict_model import StrictModel, bounded
from gateway.api.tool_result_text import has_unreadable, text_in
from gateway.api.union_branches import (
    LEFT_OUT,
    LIST,
    REFUSED,
    TEXT,
    TEXT_OR_LIST,
    LeftOut,
    Refused,
    by_type,
    null_as,
    type_branches,
)
from gateway.api.unknown_fields.ignorable_fields import ignorable, ignorable_if
from gateway.chat.conversation import ToolCall

_Status = Literal["in_progress", "completed", "incomplete"]
_SERVICE_CALLS = ("mcp_call", "code_interpreter_call", "file_search_call")
_OUTCOMES = ("output", "error", "outputs", "results")
_Found = Annotated[
    Annotated[list[Any], bounded] | None,
    ignorable_if(has_unreadable, "Text; its other fields are ignored and named."),
]
_USUAL = ("message", "function_call", "function_call_output", "reasoning")


class TextItemPart(StrictModel):
    """A piece of the user's text or of an earlier answer. Its log-probabilities are ignored."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[Any, ignorable([])] = None
    logprobs: Annotated[list[Any], bounded] | None = None


ItemPart = Annotated[
    Annotated[TextItemPart, Tag("<text>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[Refused, REFUSED],
    by_type(
        "refusal",
        usual="text",
        others=REFUSED,
        same={"text": ("input_text", "output_text", "text")},
    ),
]
ItemContent = Annotated[
    Annotated[str, TEXT] | Annotated[list[ItemPart], bounded, LIST], TEXT_OR_LIST
]


class _Item(StrictModel):
    id: str | None = None


class MessageItem(_Item):
    """A message of the conversation so far."""

    type: Annotated[Literal["message"], null_as("message")] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemContent
    status: _Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(_Item):
    """A call that the assistant made earlier."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Arguments = NONE
    status: _Status | None = None

    def as_call(self) -> ToolCall:
        """The call as a `ToolCall`."""
        return ToolCall(self.call_id, self.name, text_of(self.arguments))


class CustomCallItem(_Item):
    """A call of a custom tool; its text is the only argument."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    status: str | None = None

    def as_call(self) -> ToolCall:
        """The call as a `ToolCall`."""
        return custom_call(self.call_id, self.name, self.input)


class BuiltInCallItem(_Item):
    """A call of a tool that another service defines and the client runs."""

    type: Literal["local_shell_call", "shell_call", "apply_patch_call", "program"]
    call_id: str
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None
    code: str | None = None
    status: str | None = None

    def as_call(self) -> ToolCall:
        """The call as a `ToolCall`."""
        arguments = self.action if self.operation is None else self.operation
        if arguments is None:
            arguments = {} if self.code is None else {"code": self.code}
        return _call(self.call_id, self.type.removesuffix("_call"), arguments)


class ServiceCallItem(_Item):
    """A call that another service ran, and its result."""

    type: Literal["mcp_call", "code_interpreter_call", "file_search_call"]
    id: str
    name: str | None = None
    arguments: str | None = None
    code: str | None = None
    queries: Annotated[list[str], bounded] | None = None
    output: str | None = None
    error: Any = None
    outputs: _Found = None
    results: _Found = None
    status: str | None = None

    def as_call(self) -> ToolCall:
        """The call as a `ToolCall`."""
        name = self.name or self.type.removesuffix("_call")
        if self.arguments is not None:
            return ToolCall(self.id, name, self.arguments)
        given = {"code": self.code} if self.queries is None else {"queries": self.queries}
        return _call(self.id, name, given)

    @property
    def text(self) -> str:
        """The result of the call."""
        return text_in([self.output, self.error, self.outputs, self.results])


class FunctionOutputItem(_Item):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str | None = None
    output: ItemContent
    status: _Status | None = None


class BuiltInOutputItem(_Item):
    """The result of a call of a tool that another service defines. Some have only an id."""

    type: Literal[
        "local_shell_call_output", "shell_call_output", "apply_patch_call_output", "program_output"
    ]
    call_id: str | None = None
    output: Any = None
    result: str | None = None
    status: str | None = None

    @property
    def text(self) -> str:
        """The result."""
        return text_in([self.output, self.result]) or self.status or ""


class ReasoningPart(StrictModel):
    """A piece of reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(_Item):
    """The assistant's earlier reasoning; the summary is ignored if there is content."""

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningPart], bounded] | None = None
    content: Annotated[list[ReasoningPart], bounded] | None = None
    encrypted_content: Annotated[Any, ignorable()] = None
    status: _Status | None = None


class ItemReference(StrictModel):
    """An item of a response that is kept, by its id."""

    type: Literal["item_reference"] | None = None
    id: str


class OtherItem(LeftOut):
    """An item without anything to read."""

    usual = _USUAL


CallItem = FunctionCallItem | CustomCallItem | BuiltInCallItem | ServiceCallItem
OutputItem = FunctionOutputItem | BuiltInOutputItem
Item = MessageItem | CallItem | OutputItem | ReasoningItem
"""An item that the model reads."""

_kind_of = type_branches(
    "message",
    "function_call",
    "custom_tool_call",
    "reasoning",
    "item_reference",
    usual="message",
    others=LEFT_OUT,
    refused=("computer_call_output", "input_image", "input_file"),
    same={
        "built-in call": ("local_shell_call", "shell_call", "apply_patch_call", "program"),
        "service's call": _SERVICE_CALLS,
        "output": ("function_call_output", "custom_tool_call_output"),
        "built-in output": (
            "local_shell_call_output",
            "shell_call_output",
            "apply_patch_call_output",
            "program_output",
        ),
    },
)


def _branch(value: Any) -> str | None:
    """The branch of an item. An id without a type or a role refers to another item. A call that
    another service ran is left out without its result."""
    if isinstance(value, dict):
        kind = value.get("type")
        if kind is None and "id" in value and value.get("role") is None:
            return "<item_reference>"
        if kind in _SERVICE_CALLS and all(value.get(each) is None for each in _OUTCOMES):
            return LEFT_OUT.tag
    return _kind_of(value)


InputItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[CustomCallItem, Tag("<custom_tool_call>")]
    | Annotated[BuiltInCallItem, Tag("<built-in call>")]
    | Annotated[ServiceCallItem, Tag("<service's call>")]
    | Annotated[FunctionOutputItem, Tag("<output>")]
    | Annotated[BuiltInOutputItem, Tag("<built-in output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[ItemReference, Tag("<item_reference>")]
    | Annotated[Refused, REFUSED]
    | Annotated[OtherItem, LEFT_OUT],
    Discriminator(_branch),
]


def _call(call_id: str, name: str, arguments: dict[str, Any]) -> ToolCall:
    return ToolCall(call_id, name, json.dumps(arguments, ensure_ascii=False))
