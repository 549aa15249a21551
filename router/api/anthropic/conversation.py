"""Converts Anthropic's blocks to a `Conversation`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from protocol.errors import InvalidRequest
from router.api.anthropic.request import (
    AnthropicToolChoice,
    Block,
    CountTokensRequest,
    MessageFields,
    TextBlockFields,
    ThinkingFields,
    ToolResultFields,
    ToolUseFields,
)
from router.chat.conversation import Conversation, Message, Tool, ToolCall, ToolChoice, ToolMode

_MODES = {
    "auto": ToolMode.AUTO,
    "any": ToolMode.REQUIRED,
    "tool": ToolMode.NAMED,
    "none": ToolMode.NONE,
}
_EFFORT_BUDGETS = ((4096, "low"), (16384, "medium"))


def conversation_of(request: CountTokensRequest, can_think: bool) -> Conversation:
    """The request as a `Conversation`. `can_think`: the model's template accepts an effort.

    Raises InvalidRequest, which names the field.
    """
    messages: list[Message] = []
    if request.system:
        messages.append(Message("system", _text_of(request.system)))
    for place, each in enumerate(request.messages):
        messages += _messages_of(each, f"messages[{place}]")
    goes_on = messages[-1].role == "assistant"
    if goes_on and messages[-1].tool_calls:
        raise InvalidRequest("the last message's 'tool_use' needs a 'tool_result'", "messages")
    choice = request.tool_choice
    return Conversation(
        messages=tuple(messages),
        tools=tuple(
            Tool(each.name, each.description, each.input_schema, bool(each.strict))
            for each in request.tools or ()
        ),
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        reasoning_effort=_effort(request, can_think),
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
    )


def _messages_of(message: MessageFields, param: str) -> list[Message]:
    """A turn as messages: one for each tool result, then one for the user's text."""
    if isinstance(message.content, str):
        return [Message(message.role, message.content)]
    blocks = message.content
    if not blocks:
        raise InvalidRequest(f"'{param}.content' must not be empty", f"{param}.content")
    if message.role == "assistant":
        return [_assistant_message(blocks, param)]
    texts = [each for each in blocks if isinstance(each, TextBlockFields)]
    if message.role == "system":
        if len(texts) < len(blocks):
            raise InvalidRequest(f"'{param}': a system's content is of 'text'", f"{param}.content")
        return [Message("system", _text_of(texts))]
    results = [_result(each) for each in blocks if isinstance(each, ToolResultFields)]
    if len(results) + len(texts) < len(blocks):
        raise InvalidRequest(
            f"'{param}': a user's content is of 'text' and 'tool_result'", f"{param}.content"
        )
    return [*results, Message("user", _text_of(texts))] if texts else results


def _assistant_message(blocks: Sequence[Block], param: str) -> Message:
    if any(isinstance(each, ToolResultFields) for each in blocks):
        raise InvalidRequest(
            f"'{param}': 'tool_result' belongs to the user's content", f"{param}.content"
        )
    thoughts = [each.thinking for each in blocks if isinstance(each, ThinkingFields)]
    return Message(
        "assistant",
        _text_of(each for each in blocks if isinstance(each, TextBlockFields)),
        reasoning="\n".join(thoughts) if thoughts else None,
        tool_calls=tuple(
            ToolCall(each.id, each.name, json.dumps(each.input, ensure_ascii=False))
            for each in blocks
            if isinstance(each, ToolUseFields)
        ),
    )


def _result(block: ToolResultFields) -> Message:
    text = _text_of(block.content or "")
    return Message(
        "tool", f"Error: {text}" if block.is_error else text, tool_call_id=block.tool_use_id
    )


def _text_of(content: str | Iterable[TextBlockFields]) -> str:
    return content if isinstance(content, str) else "\n".join(each.text for each in content)


def _tool_choice(choice: AnthropicToolChoice | None) -> ToolChoice:
    if choice is None:
        return ToolChoice()
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidRequest(
            "'tool_choice.name' goes with the type 'tool', and with no other", "tool_choice"
        )
    return ToolChoice(_MODES[choice.type], choice.name)


def _effort(request: CountTokensRequest, can_think: bool) -> str | None:
    """The effort to pass to the template; None leaves the choice to the template."""
    thinking, config = request.thinking, request.output_config
    named = config.effort if config else None
    wants = named is not None or (thinking is not None and thinking.type != "disabled")
    if not can_think:
        if not wants:
            return None
        param = "thinking" if named is None else "output_config"
        raise InvalidRequest(f"'{param}': the model's chat template has no such switch", param)
    if thinking is not None and thinking.type == "disabled":
        return "none"
    if named is not None or thinking is None:
        return named
    budget = thinking.budget_tokens
    if budget is None:
        return "medium"
    return next((effort for limit, effort in _EFFORT_BUDGETS if budget < limit), "high")
