"""Plans the choices that answer a conversation, for every chat endpoint.

Rendering and encoding run off the event loop, unless they are quick. Fields that the
checkpoint's template does not use are refused by name, since they would have no effect.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from protocol.errors import InvalidRequest
from router.api.context import ApiContext
from router.api.plan import ChoicePlanner, EncodedPrompt, OutputWish, check_length
from router.api.request_fields import GenerationFields
from router.chat.conversation import Conversation, ToolMode
from router.chat.message_parser import MessageParser
from router.requests.choices import Choice
from router.requests.event_ids import StreamIdentity
from router.text.chat_template import RESERVED_NAMES, ChatTemplate
from router.text.grammar import only_rule
from router.text.tokenizer import Tokenizer

_THINKING = "enable_thinking"
MAX_INLINE_MESSAGES = 8
MAX_INLINE_CHARS = 16_384


@dataclass(frozen=True, slots=True)
class ConversationPlan:
    """The choices of an answer, and the parsers of their text: `parsers[choice.index]`."""

    choices: list[Choice]
    parsers: list[MessageParser]


async def plan_conversation(
    context: ApiContext,
    identity: StreamIdentity,
    conversation: Conversation,
    fields: GenerationFields,
    wish: OutputWish,
) -> ConversationPlan:
    """The choices that answer a conversation, sampled as `fields` specify.

    Raises PromptTooLong, and InvalidRequest for what the model's template or parsers lack.
    """
    is_cut = fields.truncate_prompt_tokens is not None
    with_special, param = fields.add_special_tokens is True, None if is_cut else wish.prompt_param
    text, token_ids = await encode_conversation(context, conversation, with_special, param)
    prompt = EncodedPrompt(token_ids, kept_ids=context.markup.kept_ids(conversation))
    grammar = await _tool_grammar(context, conversation, text, wish.grammar)
    reasons = wish.grammar is None or grammar is not None
    if grammar is not None:
        wish = replace(wish, grammar=grammar)
    choices = ChoicePlanner(context, identity, fields, wish).plan([prompt])
    parsers = [
        context.markup.parser(conversation, text, choice.request.request_id, reasons)
        for choice in choices
    ]
    return ConversationPlan(choices, parsers)


async def _tool_grammar(
    context: ApiContext, conversation: Conversation, prompt: str, wished: str | None
) -> str | None:
    """The grammar of an answer that may call tools; with `wished`, an answer without calls must
    match that grammar. None if the tools need no grammar. Raises InvalidRequest."""
    form = None if wished is None else only_rule(wished)
    is_free_to_call = conversation.tool_choice.mode is ToolMode.AUTO and conversation.may_call_tools
    if wished is not None and form is None and is_free_to_call:
        raise InvalidRequest(
            "a 'regex' or 'grammar' beside 'tools' needs a 'tool_choice' that leaves nothing open: "
            "no call, at least one, or one by name",
            "tool_choice",
        )
    grammar = context.markup.grammar(conversation, prompt, form)
    if grammar is not None:
        await context.grammars.check(grammar, "tools")
    return grammar


async def encode_conversation(
    context: ApiContext,
    conversation: Conversation,
    add_special_tokens: bool = False,
    limited_param: str | None = None,
) -> tuple[str, list[int]]:
    """Text and token ids of the prompt; templates write the special tokens themselves.

    Raises InvalidRequest. If `limited_param` names the field of the conversation, also raises
    PromptTooLong for one that is far too long, before all of it is encoded.
    """
    tokenizer = context.tokenizer

    def render() -> str:
        template = _template_of(tokenizer)
        _check(context, template, conversation)
        return render_conversation(template, conversation)

    def encode() -> tuple[str, list[int]]:
        text = render()
        if limited_param is not None:
            check_length(context, text, limited_param)
        return text, tokenizer.encode(text, add_special_tokens)

    if not _is_plain(conversation):
        return await tokenizer.in_thread(encode)
    text = render()
    return text, await tokenizer.encode_async(text, add_special_tokens)


def _is_plain(conversation: Conversation) -> bool:
    """Whether rendering is quick: a few messages of limited length, and nothing else."""
    messages = conversation.messages
    return (
        len(messages) <= MAX_INLINE_MESSAGES
        and not conversation.tools
        and not conversation.documents
        and not conversation.template_variables
        and sum(len(message.content) for message in messages) <= MAX_INLINE_CHARS
    )


def takes_effort(context: ApiContext) -> bool:
    """Whether the model's template has a variable for the reasoning effort."""
    template = context.tokenizer.chat_template
    return template is not None and bool({"reasoning_effort", _THINKING} & template.variables)


def render_conversation(template: ChatTemplate, conversation: Conversation) -> str:
    """The prompt's text. Raises InvalidRequest."""
    messages = conversation.messages_for_template(template.knows_developer_role)
    goes_on = conversation.continue_final_message
    text = template.render(
        messages,
        conversation.add_generation_prompt and not goes_on,
        _variables(template, conversation),
        [tool.for_template() for tool in conversation.tools] or None,
        list(conversation.documents) or None,
    )
    return _cut_behind(text, conversation.messages[-1].content) if goes_on else text


def _template_of(tokenizer: Tokenizer) -> ChatTemplate:
    template = tokenizer.chat_template
    if template is None:
        raise InvalidRequest(
            "the model has no chat template; use /v1/completions instead", "messages"
        )
    return template


def _check(context: ApiContext, template: ChatTemplate, conversation: Conversation) -> None:
    """Raises InvalidRequest for fields that would have no effect."""
    variables = conversation.template_variables
    for name in variables:
        if name in RESERVED_NAMES:
            raise InvalidRequest(
                f"'chat_template_kwargs' may not set '{name}'", "chat_template_kwargs"
            )
        if name not in template.variables:
            raise InvalidRequest(
                f"'chat_template_kwargs': the model's chat template does not read '{name}'",
                "chat_template_kwargs",
            )
    if conversation.documents and "documents" not in template.variables:
        raise InvalidRequest("the model's chat template takes no 'documents'", "documents")
    if conversation.tools and "tools" not in template.variables:
        raise InvalidRequest("the model's chat template takes no 'tools'", "tools")
    if conversation.may_call_tools and context.markup.tools is None:
        raise InvalidRequest(
            "'tools': how this model writes calls is unknown; the server's setting tool_parser "
            "can name it",
            "tools",
        )
    effort = conversation.reasoning_effort
    if effort is not None and not {"reasoning_effort", _THINKING} & template.variables:
        raise InvalidRequest(
            "the model's chat template takes no 'reasoning_effort'", "reasoning_effort"
        )


def _variables(template: ChatTemplate, conversation: Conversation) -> dict[str, object]:
    """The template's variables. Without `reasoning_effort`, an effort sets `enable_thinking`."""
    effort = conversation.reasoning_effort
    variables: dict[str, object] = {}
    if effort is not None:
        variables = {"reasoning_effort": effort}
        if "reasoning_effort" not in template.variables:
            variables = {_THINKING: effort != "none"}
    return {**variables, **conversation.template_variables}


def _cut_behind(text: str, content: str) -> str:
    """The prompt up to the end of its last message, without the template's text after it."""
    for wanted in (content.lstrip(), content.strip()):
        start = text.rfind(wanted) if wanted else -1
        if start >= 0:
            return text[: start + len(wanted)]
    raise InvalidRequest(
        "'continue_final_message': the last message is empty, or the chat template changes it",
        "continue_final_message",
    )
