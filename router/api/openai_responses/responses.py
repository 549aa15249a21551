"""`POST /v1/responses`, for OpenAI's clients."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from protocol.errors import InvalidRequest, PromptTooLong
from router.api.context import ApiContext
from router.api.conversation_plan import (
    NO_SWITCH,
    encode_conversation,
    plan_conversation,
    takes_effort,
)
from router.api.openai_responses import answer as api
from router.api.openai_responses.conversation import conversation_of
from router.api.openai_responses.request import InputTokensRequest, ResponsesRequest
from router.api.openai_responses.response_format import ResponseFormat
from router.api.openai_responses.truncation import truncated
from router.api.plan import OutputWish, check_model
from router.api.reply import Plan, reply
from router.api.request_fields import read_body
from router.api.stream_identity import identify
from router.api.structured_outputs import WantedFormat, wanted_grammar
from router.chat.conversation import Conversation
from router.http.request_scope import new_id, record_of
from router.http.sse import StreamStyle, as_it_is

_REPEATED = {"reasoning", "text", "tool_choice", "tools"}


def responses_router(context: ApiContext) -> APIRouter:
    """The endpoints, for an application."""
    router = APIRouter()

    async def conversation(request: Request, fields: InputTokensRequest) -> Conversation:
        asked = await context.convert(request.scope, lambda: conversation_of(fields))
        if asked.reasoning_effort is None or takes_effort(context):
            return asked
        context.ignore(request.scope, "reasoning.effort", NO_SWITCH)
        return replace(asked, reasoning_effort=None)

    async def create_response(request: Request) -> Response:
        record_of(request.scope).request_id = new_id("resp-")
        fields = await read_body(request, context, ResponsesRequest)
        generation = fields.generation
        identity = identify(request, context, generation, numbers_events=True)
        check_model(context, fields.model)
        grammar = await _grammar(request, context, fields)
        limit, logprobs = fields.max_output_tokens, fields.logprobs_count
        wish = OutputWish(limit, None, logprobs, "input", grammar, repeats_output=True)
        asked = await conversation(request, fields)
        try:
            planned = await plan_conversation(
                context, request.scope, identity, asked, generation, wish
            )
        except PromptTooLong:
            if fields.truncation != "auto":
                raise
            shorter = await truncated(context, asked, limit)
            planned = await plan_conversation(
                context, request.scope, identity, shorter, generation, wish
            )
        blank = blank_response(identity.request_id, identity.created, fields)
        answer_format = ResponseFormat(
            blank, planned.parsers[0], context.tokenizer, logprobs is not None
        )
        style = StreamStyle(frame=as_it_is, done=b"", error=answer_format.failure)
        plan = Plan(identity, generation, planned.choices, repeats_output=logprobs is not None)
        return await reply(request, context, plan, answer_format, style)

    async def count_input_tokens(request: Request) -> Response:
        fields = await read_body(request, context, InputTokensRequest)
        if fields.model is not None:
            check_model(context, fields.model)
        _, token_ids = await encode_conversation(context, await conversation(request, fields))
        answer = api.InputTokens(len(token_ids))
        return Response(msgspec.json.encode(answer), media_type="application/json")

    router.add_api_route("/v1/responses", create_response, methods=["POST"])
    router.add_api_route("/v1/responses/input_tokens", count_input_tokens, methods=["POST"])
    return router


async def _grammar(request: Request, context: ApiContext, fields: ResponsesRequest) -> str | None:
    """The text's grammar, if any. Raises InvalidRequest with this API's name of the field."""
    record, wanted = record_of(request.scope), WantedFormat(fields.response_format)
    try:
        grammar = await wanted_grammar(wanted, context, request.scope)
    except InvalidRequest as error:
        message, param = error.message, error.param or ""
        for theirs in ("response_format.json_schema", "response_format"):
            message = message.replace(f"'{theirs}", "'text.format")
            param = param.replace(theirs, "text.format")
        raise InvalidRequest(message, param) from error
    if record.ignored:
        theirs = "response_format.json_schema"
        record.ignored = [each.replace(theirs, "text.format") for each in record.ignored]
    return grammar


def blank_response(request_id: str, created: int, fields: ResponsesRequest) -> api.Response:
    """The response before it has output; it repeats the request's fields."""
    shown = fields.model_dump(mode="json", by_alias=True, exclude_none=True, include=_REPEATED)
    tools = [each for each in shown.get("tools", []) if each["type"] == "function"]
    return api.Response(
        id=request_id,
        created_at=created,
        status="in_progress",
        model=fields.model,
        output=[],
        instructions=fields.instructions,
        max_output_tokens=fields.max_output_tokens,
        metadata=fields.metadata or {},
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        reasoning=shown.get("reasoning", {}),
        temperature=fields.temperature,
        text={"format": {"type": "text"}, **shown.get("text", {})},
        tool_choice=shown.get("tool_choice", "auto"),
        tools=[{"parameters": None, "strict": False, **tool} for tool in tools],
        top_p=fields.top_p,
        user=fields.user,
        prompt_cache_key=fields.prompt_cache_key,
        safety_identifier=fields.safety_identifier,
        top_logprobs=fields.top_logprobs or 0,
        truncation=fields.truncation or "disabled",
    )
