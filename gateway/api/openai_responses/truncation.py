"""`truncation: auto`: drops a conversation's oldest turns until it fits into the context."""

from __future__ import annotations

from msgspec.structs import replace

from gateway.api.chat_prompt import encode_conversation
from gateway.api.context import ApiContext
from gateway.chat.conversation import Conversation
from gateway.history.answers import AnswerScope
from protocol.errors import PromptTooLong


async def truncated(
    context: ApiContext, conversation: Conversation, output_tokens: int | None
) -> Conversation:
    """The conversation with as few turns as possible dropped from its beginning.

    A turn begins with a user message. System and developer messages at the head stay, and so does
    the last turn, whether or not it fits. `output_tokens` are reserved for the output. Raises
    InvalidRequest.
    """
    messages = conversation.messages
    instructing = [each.role in ("system", "developer") for each in messages]
    head = instructing.index(False) if False in instructing else len(messages)
    starts = [place for place in range(head + 1, len(messages)) if messages[place].role == "user"]
    if not starts:
        return conversation
    room = context.model.max_context - (output_tokens or 1)

    def behind(start: int) -> Conversation:
        return replace(conversation, messages=(*messages[:head], *messages[start:]))

    async def fits(start: int) -> bool:
        try:
            _, token_ids = await encode_conversation(
                context, behind(start), AnswerScope(restores=False), limited_param="input"
            )
        except PromptTooLong:
            return False
        return len(token_ids) <= room

    low, high = 0, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        if await fits(starts[middle]):
            high = middle
        else:
            low = middle + 1
    return behind(starts[low])
