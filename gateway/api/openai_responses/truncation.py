"""`truncation: auto`: drops a conversation's oldest turns until it fits into the context.

A whole prompt takes long to render and encode. So the tokens of the turns' texts are counted first,
from the newest turn back, until there is no more room. Calls and the template's own tokens are not
in these texts, so prompts around that place are then encoded, usually two of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from gateway.api.chat_prompt import encode_conversation
from gateway.api.choice_planner import check_text_length
from gateway.api.context import ApiContext
from gateway.chat.conversation import Conversation, Message
from gateway.history.answers import AnswerScope
from gateway.text.fair_threads import Steps
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
    chars = sum([len(each.content) for each in messages])
    probe = await context.tokenizer.steps_in_thread(_guess(context, messages, starts, room), chars)
    step, went_down = 1, None
    while low < high:
        probe = min(max(probe, low), high - 1)
        goes_down = await fits(starts[probe])
        if goes_down:
            high = probe
        else:
            low = probe + 1
        if went_down in (None, goes_down):
            probe = high - step if goes_down else low + step - 1
            step, went_down = 2 * step, goes_down
        else:
            probe = (low + high) // 2
    return behind(starts[low])


def _guess(
    context: ApiContext, messages: Sequence[Message], starts: Sequence[int], room: int
) -> Steps[int]:
    """The place in `starts` from which the texts of the messages have about `room` tokens."""
    end, last = len(messages), len(starts) - 1
    for number in range(last, -1, -1):
        for each in messages[starts[number] : end]:
            try:
                check_text_length(context, each.content, "input")
            except PromptTooLong:
                return min(number + 1, last)
            encoded = yield from context.tokenizer.encode_steps([each.content], False)
            room -= len(encoded)
            if room < 0:
                return min(number + 1, last)
            yield
        end = starts[number]
    return 0
