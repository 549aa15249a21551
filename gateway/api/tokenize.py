"""`POST /tokenize` and `/detokenize`: vLLM's endpoints that convert text to token ids and back."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from fastapi import APIRouter, Request
from msgspec import Struct
from pydantic import Field
from starlette.responses import Response
from starlette.types import Scope

from gateway.api.answer_scopes import counting_scope, restore
from gateway.api.body_reader import RequestBody, only, read_body
from gateway.api.chat_prompt import drop_unread, encode_conversation
from gateway.api.choice_planner import check_model, check_text_length
from gateway.api.context import ApiContext
from gateway.api.function_tools import MAX_TOOLS, ToolFields, functions_of
from gateway.api.generation_fields import CacheSalt
from gateway.api.openai.chat_messages import ChatMessage, continues_last, messages_of
from gateway.api.openai.chat_request import NO_TEMPLATES
from gateway.api.sampling_params import check_token_ids
from gateway.api.strict_model import MAX_TOKEN_IDS, MAX_VALUES_WITH_IDS, bounded, first_error
from gateway.chat.conversation import Conversation
from gateway.text.fair_threads import Steps
from protocol.errors import InvalidRequest

NAMED_AT_ONCE = 1 << 14


class TokenizeRequest(RequestBody):
    """A text in `prompt`, or a conversation in `messages` as the chat endpoint would render it.

    The ids are those that a request of the same key and `cache_salt` would have.
    `add_special_tokens` defaults to true for a text, and to false for a conversation, whose
    template writes the special tokens itself.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1), bounded] | None = None
    tools: Annotated[list[ToolFields], Field(max_length=MAX_TOOLS), first_error] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: CacheSalt | None = None
    chat_template: Annotated[Any, only(why=NO_TEMPLATES)] = None

    def check_together(self) -> None:
        """See the base class."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give either 'prompt' or 'messages'", "prompt")


class DetokenizeRequest(RequestBody):
    """Token ids; special tokens among them are part of the text."""

    max_values: ClassVar[int] = MAX_VALUES_WITH_IDS

    model: str | None = None
    tokens: Annotated[
        list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_TOKEN_IDS), first_error
    ]


class Tokens(Struct, frozen=True):
    """Answer of `/tokenize`. `token_strs` are the tokens as spelled in the vocabulary."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(Struct, frozen=True):
    """Answer of `/detokenize`."""

    prompt: str


def tokenize_router(context: ApiContext) -> APIRouter:
    """The endpoints, for an application."""
    router = APIRouter()
    tokenizer = context.tokenizer

    async def tokenize(request: Request) -> Response:
        fields = await read_body(request, context, TokenizeRequest)
        _check_model(context, fields.model)
        tokens = await _tokens_of(context, fields, request.scope)

        def answer() -> Steps[bytes]:
            names: list[str] | None = None
            if fields.return_token_strs:
                names = []
                for start in range(0, len(tokens), NAMED_AT_ONCE):
                    names += map(tokenizer.token_name, tokens[start : start + NAMED_AT_ONCE])
                    yield
            return msgspec.json.encode(
                Tokens(len(tokens), context.model.max_context, tokens, names)
            )

        document = await tokenizer.in_steps(answer(), len(tokens))
        return Response(document, media_type="application/json")

    async def detokenize(request: Request) -> Response:
        fields = await read_body(request, context, DetokenizeRequest)
        _check_model(context, fields.model)

        def answer() -> Steps[bytes]:
            check_token_ids(fields.tokens, tokenizer.vocab_size, "tokens")
            text = yield from tokenizer.decode_steps(fields.tokens, skip_special_tokens=False)
            return msgspec.json.encode(DetokenizedText(text))

        document = await tokenizer.in_steps(answer(), len(fields.tokens))
        return Response(document, media_type="application/json")

    router.add_api_route("/tokenize", tokenize, methods=["POST"])
    router.add_api_route("/detokenize", detokenize, methods=["POST"])
    return router


def _check_model(context: ApiContext, name: str | None) -> None:
    if name is not None:
        check_model(context, name)


async def _tokens_of(context: ApiContext, fields: TokenizeRequest, scope: Scope) -> list[int]:
    if fields.messages is None:
        assert fields.prompt is not None, "one of the two was given"
        check_text_length(context, fields.prompt, "prompt")
        with_special = fields.add_special_tokens is not False
        ids = await context.tokenizer.encode_async(fields.prompt, with_special)
        answers = counting_scope(scope, fields.cache_salt, is_conversation=False)
        return (await restore(context, answers, [fields.prompt], ids))[1]
    asked = await context.convert(scope, lambda: conversation_of(fields))
    conversation = drop_unread(context, scope, asked, ())
    with_special = fields.add_special_tokens is True
    answers = counting_scope(scope, fields.cache_salt)
    return (await encode_conversation(context, conversation, answers, with_special))[1]


def conversation_of(fields: TokenizeRequest) -> Conversation:
    """The conversation of a request that has one."""
    assert fields.messages is not None, "it has no text"
    return Conversation(
        messages=messages_of(fields.messages),
        tools=functions_of(fields.tools),
        template_variables=fields.chat_template_kwargs or {},
        add_generation_prompt=fields.add_generation_prompt is not False,
        continue_final_message=continues_last(
            fields.messages, fields.continue_final_message, fields.add_generation_prompt
        ),
    )
