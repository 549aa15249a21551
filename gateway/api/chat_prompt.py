"""The prompt of a conversation, for every chat endpoint, and the choices that answer it.

The checkpoint's template renders it; without a template, a conversation is refused. Rendering and
encoding run off the event loop, unless they are quick. Variables and efforts that the template does
not read are ignored and named; other fields that it does not use are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec
from msgspec.structs import replace
from starlette.types import Scope

from gateway.api.answer_scopes import restore, scope_of
from gateway.api.choice_planner import (
    ChoicePlanner,
    EncodedPrompt,
    check_length,
    check_num_bytes,
    check_text_length,
)
from gateway.api.constraints.call_grammar import call_grammar
from gateway.api.context import ApiContext
from gateway.api.generation_fields import GenerationFields
from gateway.api.output_limit import OutputWish
from gateway.api.strict_model import check_bounds
from gateway.api.unknown_fields.ignored import MAX_CHECKED, MAX_NAME_CHARS, MAX_NAMES
from gateway.api.unknown_fields.misspellings import meant_field
from gateway.chat.continued_message import open_end
from gateway.chat.conversation import Conversation
from gateway.chat.markup import ChatMarkup
from gateway.chat.message_parser import MessageParser
from gateway.grammars.grammar import shortest_json
from gateway.history.answers import AnswerScope, PromptText
from gateway.output.choices import Choice
from gateway.output.event_ids import StreamIdentity
from gateway.text.chat_template import RESERVED_NAMES, ChatTemplate
from gateway.text.control_tokens import split_at_marks
from gateway.text.fair_threads import Steps
from gateway.text.template_input import TemplateInput
from gateway.text.tokenizer import Tokenizer
from protocol.errors import InvalidRequest

_THINKING = "enable_thinking"
_SWITCHES = ("reasoning_effort", _THINKING)
MAX_INLINE_MESSAGES = 8
MAX_INLINE_CHARS = 16_384
MAX_TOOLS_BYTES = 1 << 20
MAX_PAST_CALLS_BYTES = 1 << 26


class ConversationPlan(msgspec.Struct, frozen=True):
    """The choices of an answer, and the parsers of their text: `parsers[choice.index]`."""

    choices: list[Choice]
    parsers: list[MessageParser]


async def plan_conversation(
    context: ApiContext,
    scope: Scope,
    identity: StreamIdentity,
    conversation: Conversation,
    fields: GenerationFields,
    wish: OutputWish,
) -> ConversationPlan:
    """The choices that answer a conversation, sampled as `fields` specify.

    Raises PromptTooLong, and InvalidRequest for features that the model's template or parsers lack.
    """
    is_cut = fields.truncate_prompt_tokens is not None
    with_special, param = fields.add_special_tokens is True, None if is_cut else wish.prompt_param
    answers = scope_of(identity, fields.cache_salt, True, wish.may_be_kept)
    encoded, token_ids = await encode_conversation(
        context, conversation, answers, with_special, param
    )
    markup, text = context.markup, encoded.text
    grammar = None
    if conversation.tools:
        grammar = await call_grammar(context, scope, conversation, text, wish.grammar)
    if grammar is None and wish.grammar is not None:
        grammar = await _after_thoughts(context, conversation, text, wish.grammar)
    reasons = wish.grammar is None or grammar is not None
    if grammar is not None:
        wish = replace(wish, grammar=grammar)
    thoughts = markup.thoughts(conversation, text) if reasons else None
    prompt = EncodedPrompt(
        token_ids,
        kept_ids=markup.kept_ids(conversation),
        thoughts=thoughts,
        contents=partial(markup.content_scan, conversation),
        is_encoded=True,
        text=None if context.answers is None else encoded,
    )
    choices = ChoicePlanner(context, identity, fields, wish).plan([prompt])
    parsers = [
        markup.parser_behind(thoughts, conversation, each.request.request_id) for each in choices
    ]
    return ConversationPlan(choices, parsers)


async def _after_thoughts(
    context: ApiContext, conversation: Conversation, prompt: str, wished: str
) -> str | None:
    """The grammar of an answer that may reason before it follows the `wished` one; None if the
    model cannot reason. Raises InvalidRequest."""
    grammar = context.markup.after_thoughts(conversation, prompt, wished)
    if grammar is not None:
        await context.grammars.check(grammar, "response_format")
    return grammar


async def encode_conversation(
    context: ApiContext,
    conversation: Conversation,
    scope: AnswerScope,
    add_special_tokens: bool = False,
    limited_param: str | None = None,
) -> tuple[PromptText, list[int]]:
    """Text and token ids of the prompt; templates write the special tokens themselves. Remembered
    answers of the scope have the ids with which they were generated.

    Raises InvalidRequest. If `limited_param` names the field of the conversation, also raises
    PromptTooLong for one that is far too long, before all of it is encoded.
    """
    parts, token_ids = await _encode(context, conversation, add_special_tokens, limited_param)
    if "assistant" not in [message.role for message in conversation.messages]:
        return PromptText(parts[0] if len(parts) == 1 else "".join(parts), scope), token_ids
    return await restore(context, scope, parts, token_ids)


async def _encode(
    context: ApiContext,
    conversation: Conversation,
    add_special_tokens: bool,
    limited_param: str | None,
) -> tuple[list[str], list[int]]:
    """The parts of the prompt's text, and its ids as the tokenizer chooses them."""
    tokenizer = context.tokenizer

    def render() -> list[str]:
        template = _template_of(tokenizer, conversation)
        _check(context.markup, template, conversation)
        if conversation.tools:
            _check_tools_length(conversation)
        check_num_bytes(context, num_chars, limited_param or "messages")
        return render_conversation(template, conversation, context.markup)

    def encode() -> Steps[tuple[list[str], list[int]]]:
        _check_past_calls(conversation)
        parts = render()
        yield
        text = "".join(parts)
        check_text_length(context, text, limited_param or "messages")
        if limited_param is not None:
            yield from check_length(context, text, limited_param)
        return parts, (yield from tokenizer.encode_steps(parts, add_special_tokens))

    num_chars = sum([len(message.content) for message in conversation.messages])
    if not _is_plain(conversation):
        return await tokenizer.steps_in_thread(encode(), num_chars)
    parts = render()
    if len(parts) == 1:
        return parts, await tokenizer.encode_async(parts[0], add_special_tokens)
    return parts, await tokenizer.in_steps(
        tokenizer.encode_steps(parts, add_special_tokens), sum(map(len, parts))
    )


def encode_whole(
    tokenizer: Tokenizer, markup: ChatMarkup, conversation: Conversation, add_special_tokens: bool
) -> list[int]:
    """The token ids of the prompt, at once and of any length. Raises InvalidRequest."""
    template = _template_of(tokenizer, conversation)
    _check(markup, template, conversation)
    parts = render_conversation(template, conversation, markup)
    return tokenizer.encode_parts(parts, add_special_tokens)


def _is_plain(conversation: Conversation) -> bool:
    """Whether rendering is quick: a few messages of limited length, and nothing else."""
    messages = conversation.messages
    if len(messages) > MAX_INLINE_MESSAGES or conversation.tools:
        return False
    if conversation.documents or conversation.template_variables:
        return False
    num_chars = 0
    for each in messages:
        if each.tool_calls:
            return False
        num_chars += len(each.content)
        if each.reasoning or each.name or each.tool_call_id:
            others = (each.reasoning, each.name, each.tool_call_id)
            num_chars += sum([len(text) for text in others if text])
    return num_chars <= MAX_INLINE_CHARS


def drop_unread(
    context: ApiContext, scope: Scope, conversation: Conversation, effort_params: Sequence[str]
) -> Conversation:
    """The conversation without what its template does not read, which is named among the ignored
    fields: tools that the answer may not call, the reasoning effort, by the fields that set it, and
    variables. Raises InvalidRequest for a variable that looks like a typing error."""
    template = _chosen_template(context.tokenizer, conversation)
    if template is None:
        return conversation
    known = template.variables
    if conversation.tools and not conversation.may_call_tools and "tools" not in known:
        context.ignore(scope, ["tools"], "the model's chat template takes no tools")
        conversation = replace(conversation, tools=())
    if conversation.reasoning_effort is not None and known.isdisjoint(_SWITCHES):
        context.ignore(scope, effort_params, "the model's chat template has no switch for thinking")
        conversation = replace(conversation, reasoning_effort=None)
    given = conversation.template_variables
    read = {name: given[name] for name in given if name in known or name in RESERVED_NAMES}
    unread = [name for name in given if name not in read]
    if not unread:
        return conversation
    for name in unread[:MAX_CHECKED]:
        meant = meant_field(name, known)
        if meant is not None:
            raise InvalidRequest(
                f"'chat_template_kwargs': the model's chat template does not read '{name}'; did "
                f"you mean '{meant}'?",
                "chat_template_kwargs",
            )
    params = [f"chat_template_kwargs.{name[:MAX_NAME_CHARS]}" for name in unread[:MAX_NAMES]]
    context.ignore(scope, params, "the model's chat template does not read it")
    return replace(conversation, template_variables=read)


def render_conversation(
    template: ChatTemplate, conversation: Conversation, markup: ChatMarkup
) -> list[str]:
    """The prompt's text in parts. It is cut inside of user texts that look like control tokens,
    because no token may span two parts. Raises InvalidRequest."""
    shape = template.shape(bool(conversation.tools), bool(conversation.documents))
    given = TemplateInput(
        conversation.messages_for_template(shape),
        [tool.for_template() for tool in conversation.tools],
        list(conversation.documents),
        _variables(template, conversation),
    )
    mark = markup.mark_control_tokens(given)
    end = None
    if conversation.continue_final_message:
        end = open_end(given.messages, mark)
    text = template.render(
        given.messages,
        conversation.add_generation_prompt and end is None,
        given.variables,
        given.tools or None,
        given.documents or None,
        conversation.names.messages,
    )
    if end is not None:
        text = end.cut(text, conversation.names.prefill)
    return [text] if mark is None else split_at_marks(text, mark)


def _template_of(tokenizer: Tokenizer, conversation: Conversation) -> ChatTemplate:
    template = _chosen_template(tokenizer, conversation)
    if template is None:
        raise InvalidRequest(
            "the model has no chat template; use /v1/completions instead",
            conversation.names.messages,
        )
    return template


def _chosen_template(tokenizer: Tokenizer, conversation: Conversation) -> ChatTemplate | None:
    """The default template, or the one for conversations with tools; None if there is none."""
    return tokenizer.tool_template if conversation.tools else tokenizer.chat_template


def _check(markup: ChatMarkup, template: ChatTemplate, conversation: Conversation) -> None:
    """Raises InvalidRequest for fields that would have no effect."""
    for name in RESERVED_NAMES:
        if name in conversation.template_variables:
            raise InvalidRequest(
                f"'chat_template_kwargs' may not set '{name}'", "chat_template_kwargs"
            )
    if conversation.documents and "documents" not in template.variables:
        raise InvalidRequest("the model's chat template takes no 'documents'", "documents")
    if conversation.tools and "tools" not in template.variables:
        raise InvalidRequest("the model's chat template takes no 'tools'", "tools")
    if conversation.may_call_tools and markup.tools is None:
        raise InvalidRequest(
            f"'tools': {markup.no_tools_reason}; the server's setting tool_parser can "
            "name the format",
            "tools",
        )


def _check_tools_length(conversation: Conversation) -> None:
    """Raises InvalidRequest if the tools are too long together: templates and grammars write them
    several times."""
    tools = conversation.tools
    num_bytes = sum(len(tool.description or "") for tool in tools)
    for tool in tools:
        num_bytes += shortest_json(tool.parameters, MAX_TOOLS_BYTES)
        if num_bytes > MAX_TOOLS_BYTES:
            raise InvalidRequest(f"'tools' exceed {MAX_TOOLS_BYTES} bytes together", "tools")


def _check_past_calls(conversation: Conversation) -> None:
    """Raises InvalidRequest for past calls whose arguments hold too many values. Arguments are
    strings, whose contents the bounds of a body do not cover."""
    num_bytes = sum(
        check_bounds(call.arguments.encode())
        for message in conversation.messages
        for call in message.tool_calls
    )
    if num_bytes > MAX_PAST_CALLS_BYTES:
        raise InvalidRequest(
            f"the arguments of past calls take {num_bytes} bytes of memory once they are decoded; "
            f"the limit is {MAX_PAST_CALLS_BYTES}",
            conversation.names.messages,
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
