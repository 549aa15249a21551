"""`POST /v1/messages` and `/v1/messages/count_tokens`, for Anthropic's clients."""

from __future__ import annotations

import re

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from gateway.api.answer_scopes import counting_scope
from gateway.api.anthropic.answer import Ping, TokenCount
from gateway.api.anthropic.answer_format import MessageFormat
from gateway.api.anthropic.conversation import conversation_of, wishes_for_thinking
from gateway.api.anthropic.request import CountTokensRequest, MessagesRequest
from gateway.api.body_reader import read_body
from gateway.api.chat_prompt import drop_unread, encode_conversation, plan_conversation
from gateway.api.choice_planner import check_model
from gateway.api.constraints.answer_grammar import wanted_grammar
from gateway.api.context import ApiContext
from gateway.api.output_limit import OutputWish
from gateway.api.replies.plan import Plan
from gateway.api.replies.reply import reply
from gateway.api.stream_identity import identify
from gateway.chat.conversation import Conversation
from gateway.http.anthropic_errors import anthropic_error
from gateway.http.request_scope import record_of
from gateway.text.bad_words import bad_word_tokens
from http_kit.sse import StreamStyle, as_it_is, named_event
from protocol.errors import InvalidRequest

VERSION_HEADER = "anthropic-version"
FIRST_VERSION = "2023-06-01"
_VERSION_FORMAT = re.compile(r"\d{4}-\d{2}-\d{2}")


def messages_router(context: ApiContext) -> APIRouter:
    """The endpoints, for an application."""
    router = APIRouter()

    async def conversation(request: Request, fields: CountTokensRequest) -> Conversation:
        _check_version(request)
        check_model(context, fields.model)
        asked = await context.convert(request.scope, lambda: conversation_of(fields))
        return drop_unread(context, request.scope, asked, wishes_for_thinking(fields))

    async def create_message(request: Request) -> Response:
        record_of(request.scope).use_prefix("msg_")
        fields = await read_body(request, context, MessagesRequest)
        asked = await conversation(request, fields)
        generation = fields.generation
        identity = identify(request, context, generation, numbers_events=True)
        grammar = await wanted_grammar(fields.constraints, context, request.scope)
        bad_words = await bad_word_tokens(context.tokenizer, fields.bad_words or ())
        wish = OutputWish(fields.output_limit, None, None, "messages", grammar, bad_words)
        planned = await plan_conversation(context, request.scope, identity, asked, generation, wish)
        answer_format = MessageFormat(identity.request_id, context.model.name, planned.parsers[0])
        plan = Plan(identity, generation, planned.choices)
        return await reply(request, context, plan, answer_format, _style(identity.request_id))

    async def count_tokens(request: Request) -> Response:
        fields = await read_body(request, context, CountTokensRequest)
        asked = await conversation(request, fields)
        answers = counting_scope(request.scope, fields.cache_salt)
        _, token_ids = await encode_conversation(context, asked, answers)
        answer = TokenCount(len(token_ids))
        return Response(msgspec.json.encode(answer), media_type="application/json")

    router.add_api_route("/v1/messages", create_message, methods=["POST"])
    router.add_api_route("/v1/messages/count_tokens", count_tokens, methods=["POST"])
    return router


def _check_version(request: Request) -> None:
    """Checks the date; earlier versions stream in another format. Raises InvalidRequest."""
    version = request.headers.get(VERSION_HEADER, FIRST_VERSION)
    if not _VERSION_FORMAT.fullmatch(version) or version < FIRST_VERSION:
        raise InvalidRequest(
            f"the header '{VERSION_HEADER}' must be a date, {FIRST_VERSION} or later",
            VERSION_HEADER,
        )


def _style(request_id: str) -> StreamStyle:
    """All events are named, errors included; a ping keeps the connection alive."""
    return StreamStyle(
        frame=as_it_is,
        done=b"",
        keep_alive=named_event("ping", msgspec.json.encode(Ping())),
        error=lambda error: named_event("error", anthropic_error(error, request_id)),
    )
