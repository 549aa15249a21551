"""Converts the input items of a response to a `Conversation`.

Consecutive items from one turn of the assistant (its reasoning, text and calls) become one
message, as chat templates expect.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.api.function_tools import only_allowed
from gateway.api.openai_responses.input_items import (
    BuiltInOutputItem,
    CallItem,
    FunctionOutputItem,
    Item,
    ItemContent,
    MessageItem,
    OutputItem,
    ReasoningItem,
    ServiceCallItem,
)
from gateway.api.openai_responses.kept_items import items_of
from gateway.api.openai_responses.request import (
    AllowedChoice,
    ChosenTool,
    InputTokensRequest,
    ResponseFunction,
)
from gateway.chat.conversation import (
    Conversation,
    FieldNames,
    Message,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
)
from protocol.errors import InvalidRequest

_NAMES = FieldNames("input", "reasoning.effort", is_chat=False)


def conversation_of(request: InputTokensRequest) -> Conversation:
    """The request as a `Conversation`. Raises InvalidRequest."""
    messages: list[Message] = []
    if request.instructions is not None:
        messages.append(Message("developer", request.instructions))
    if isinstance(request.input, str):
        messages.append(Message("user", request.input))
    else:
        messages += _messages_of(items_of(request.input))
    if not messages:
        raise InvalidRequest("'input': the model can read nothing in it", "input")
    chosen = request.tool_choice
    tools = tuple(
        Tool(
            each.name,
            each.description,
            each.parameters,
            bool(each.strict),
            f"tools[{place}].parameters",
        )
        for place, each in enumerate(request.tools or ())
        if isinstance(each, ResponseFunction)
    )
    if isinstance(chosen, AllowedChoice):
        tools = only_allowed(tools, (each.name for each in chosen.tools))
    return Conversation(
        messages=tuple(messages),
        tools=tools,
        tool_choice=_tool_choice(chosen),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        names=_NAMES,
    )


def _tool_choice(chosen: str | ChosenTool | AllowedChoice | None) -> ToolChoice:
    if isinstance(chosen, ChosenTool):
        return ToolChoice(ToolMode.NAMED, chosen.name)
    if isinstance(chosen, AllowedChoice):
        return ToolChoice(ToolMode(chosen.mode))
    return ToolChoice(ToolMode(chosen or "auto"))


@dataclass
class _Turn:
    """A turn of the assistant while its items are collected."""

    reasoning: list[str] = field(default_factory=list)
    content: str | None = None
    parts: tuple[str, ...] = ()
    calls: list[ToolCall] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return self.content is None and not self.reasoning and not self.calls

    def message(self) -> Message:
        reasoning = "\n".join(self.reasoning) or None
        return Message(
            "assistant",
            self.content or "",
            reasoning=reasoning,
            tool_calls=tuple(self.calls),
            parts=self.parts,
        )


def _messages_of(items: list[Item]) -> list[Message]:
    messages: list[Message] = []
    turn = _Turn()

    def end_turn() -> None:
        nonlocal turn
        if not turn.is_empty:
            messages.append(turn.message())
        turn = _Turn()

    for item in items:
        if isinstance(item, ReasoningItem):
            if turn.content is not None or turn.calls:
                end_turn()
            parts = item.content or item.summary or []
            turn.reasoning += [part.text for part in parts]
        elif isinstance(item, CallItem):
            turn.calls.append(item.as_call())
            if isinstance(item, ServiceCallItem):
                end_turn()
                messages.append(Message("tool", item.text, tool_call_id=item.id))
        elif isinstance(item, MessageItem) and item.role == "assistant":
            if turn.content is not None or turn.calls:
                end_turn()
            turn.content, turn.parts = _text_of(item.content), _parts_of(item.content)
        else:
            end_turn()
            messages.append(_other_message(item))
    end_turn()
    return messages


def _other_message(item: MessageItem | OutputItem) -> Message:
    if isinstance(item, BuiltInOutputItem):
        return Message("tool", item.text, tool_call_id=item.call_id or item.id)
    if isinstance(item, FunctionOutputItem):
        return Message(
            "tool",
            _text_of(item.output),
            tool_call_id=item.call_id,
            parts=_parts_of(item.output),
        )
    return Message(item.role, _text_of(item.content), parts=_parts_of(item.content))


def _text_of(content: ItemContent) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _parts_of(content: ItemContent) -> tuple[str, ...]:
    """The texts of a content's parts; none for a content of a single part."""
    if isinstance(content, str) or len(content) < 2:
        return ()
    return tuple(part.text for part in content)
