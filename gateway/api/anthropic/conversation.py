"""Converts Anthropic's blocks to a `Conversation`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from gateway.api.anthropic.blocks import (
    Block,
    OtherBlock,
    ServerResultFields,
    ServerUseFields,
    TextBlockFields,
    TextLike,
    ThinkingFields,
    ToolResultFields,
    ToolUseFields,
)
from gateway.api.anthropic.request import (
    AnthropicFunction,
    AnthropicToolChoice,
    CountTokensRequest,
    MessageFields,
)
from gateway.chat.conversation import (
    Conversation,
    FieldNames,
    Message,
    Role,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
)
from protocol.errors import InvalidRequest

_MODES = {
    "auto": ToolMode.AUTO,
    "any": ToolMode.REQUIRED,
    "tool": ToolMode.NAMED,
    "none": ToolMode.NONE,
}
_NAMES = FieldNames(effort="output_config", prefill="messages", is_chat=False)
_BILLING_LINE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*(?:\n|\Z)")
_EFFORT_BUDGETS = ((4096, "low"), (16384, "medium"))


def conversation_of(request: CountTokensRequest) -> Conversation:
    """The request as a `Conversation`. Raises InvalidRequest, which names the field."""
    messages: list[Message] = []
    system = _system_of(request)
    if system.content:
        messages.append(system)
    for place, each in enumerate(request.messages):
        messages += _messages_of(each, f"messages[{place}]")
    if not messages:
        raise InvalidRequest("'messages': the model can read nothing in it", "messages")
    goes_on = messages[-1].role == "assistant"
    if goes_on and messages[-1].tool_calls:
        raise InvalidRequest("the last message's 'tool_use' needs a 'tool_result'", "messages")
    choice = request.tool_choice
    return Conversation(
        messages=tuple(messages),
        tools=tuple(
            Tool(
                each.name,
                each.description,
                each.input_schema,
                bool(each.strict),
                f"tools[{place}].input_schema",
            )
            for place, each in enumerate(request.tools or ())
            if isinstance(each, AnthropicFunction)
        ),
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        reasoning_effort=_effort(request),
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
        names=_NAMES,
    )


def _system_of(request: CountTokensRequest) -> Message:
    """The system prompt, without the line that Claude Code puts first: that line changes with every
    request, so no prompt would have a cached prefix."""
    texts = _texts_of(request.system)
    if texts:
        first = _BILLING_LINE.sub("", texts[0], count=1)
        texts[:1] = [first] if first or not texts[0] else []
    return _message_of("system", texts)


def _messages_of(message: MessageFields, param: str) -> list[Message]:
    """A turn as messages: one for each tool result, then one for the user's text."""
    if isinstance(message.content, str):
        return [Message(message.role, message.content)]
    blocks = message.content
    if message.role == "assistant":  # its content may be empty, if the token limit cut it off
        return _assistant_messages(blocks, param)
    if not blocks:
        raise InvalidRequest(f"'{param}.content' must not be empty", f"{param}.content")
    texts = _texts_of(blocks)
    if message.role == "system":
        _check_blocks(blocks, TextLike, f"{param}.content", "a system's content is of text")
        return [_message_of("system", texts)] if texts else []
    allowed = (*TextLike, ToolResultFields)
    what = "a user's content is of text and 'tool_result'"
    _check_blocks(blocks, allowed, f"{param}.content", what)
    results = [_result(each) for each in blocks if isinstance(each, ToolResultFields)]
    return [*results, _message_of("user", texts)] if texts else results


def _check_blocks(blocks: Sequence[Block], allowed: tuple[type, ...], param: str, why: str) -> None:
    """Raises InvalidRequest for the first block that is neither `allowed` nor left out."""
    for place, each in enumerate(blocks):
        if not isinstance(each, (*allowed, OtherBlock)):
            raise InvalidRequest(f"'{param}[{place}]': {why}", f"{param}[{place}]")


@dataclass
class _Turn:
    """A part of the assistant's turn, up to the results of tools that another service ran."""

    thoughts: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    results: list[Message] = field(default_factory=list)

    def messages(self) -> list[Message]:
        """The message, followed by the results."""
        said = replace(
            _message_of("assistant", self.texts),
            reasoning="\n".join(self.thoughts) if self.thoughts else None,
            tool_calls=tuple(self.calls),
        )
        return [said, *self.results]


def _assistant_messages(blocks: Sequence[Block], param: str) -> list[Message]:
    """The assistant's turn as one message. Results of another service's tools are messages of their
    own, as templates expect. A call of such a tool without a result in the same turn gets an empty
    one."""
    ended = {each.tool_use_id for each in blocks if isinstance(each, ServerResultFields)}
    turns = [_Turn()]
    for place, each in enumerate(blocks):
        if isinstance(each, ToolResultFields):
            at = f"{param}.content[{place}]"
            raise InvalidRequest(f"'{at}': 'tool_result' belongs to the user's content", at)
        if isinstance(each, ServerResultFields):
            turns[-1].results.append(_result(each))
            continue
        if turns[-1].results and not isinstance(each, OtherBlock):
            turns.append(_Turn())
        turn = turns[-1]
        if isinstance(each, ThinkingFields):
            turn.thoughts.append(each.thinking)
        elif isinstance(each, (ToolUseFields, ServerUseFields)):
            turn.calls.append(
                ToolCall(each.id, each.name, json.dumps(each.input, ensure_ascii=False))
            )
            if isinstance(each, ServerUseFields) and each.id not in ended:
                turn.results.append(Message("tool", "", tool_call_id=each.id))
        else:
            turn.texts += _texts_of([each])
    return [message for turn in turns for message in turn.messages()]


def _result(block: ToolResultFields | ServerResultFields) -> Message:
    texts = [block.text] if isinstance(block, ServerResultFields) else _texts_of(block.content)
    if block.is_error:
        texts[:1] = [f"Error: {''.join(texts[:1])}"]
    return replace(_message_of("tool", texts), tool_call_id=block.tool_use_id)


def _texts_of(content: str | Iterable[Any] | None) -> list[str]:
    if isinstance(content, str):
        return [content]
    shown = (*TextLike, ServerResultFields)
    return [
        each.text
        for each in content or ()
        if isinstance(each, TextBlockFields) or (isinstance(each, shown) and each.text)
    ]


def _message_of(role: Role, texts: Sequence[str]) -> Message:
    """A message with these texts; several of them become parts of its content."""
    return Message(role, "\n".join(texts), parts=tuple(texts) if len(texts) > 1 else ())


def _tool_choice(choice: AnthropicToolChoice | None) -> ToolChoice:
    if choice is None:
        return ToolChoice()
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidRequest(
            "'tool_choice.name' goes with the type 'tool', and with no other", "tool_choice"
        )
    return ToolChoice(_MODES[choice.type], choice.name)


def wishes_for_thinking(request: CountTokensRequest) -> list[str]:
    """The fields that ask the model to think."""
    thinking, config = request.thinking, request.output_config
    asks = thinking is not None and thinking.type != "disabled"
    names = ["thinking"] if asks else []
    return names if config is None or config.effort is None else [*names, "output_config.effort"]


def _effort(request: CountTokensRequest) -> str | None:
    """The effort to pass to the template; None leaves the choice to the template."""
    thinking, config = request.thinking, request.output_config
    named = config.effort if config else None
    if thinking is not None and thinking.type == "disabled":
        return "none"
    if named is not None or thinking is None:
        return named
    budget = thinking.budget_tokens
    if budget is None:
        return "medium"
    return next((effort for limit, effort in _EFFORT_BUDGETS if budget < limit), "high")
