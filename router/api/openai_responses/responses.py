"""`POST /v1/responses`, for OpenAI's clients."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from protocol.errors import PromptTooLong
from router.api.context import ApiContext
from router.api.conversation_plan import plan_conversation
from router.api.openai_responses import answer as api
from router.api.openai_responses.conversation import conversation_of
from router.api.openai_responses.request import ResponsesRequest
from router.api.openai_responses.response_format import ResponseFormat
from router.api.openai_responses.truncation import truncated
from router.api.plan import OutputWish, check_model
from router.api.reply import Plan, reply
from router.api.request_fields import read_fields
from router.api.stream_identity import identify
from router.api.structured_outputs import wanted_grammar
from router.http.request_scope import new_id, record_of
from router.http.sse import StreamStyle, as_it_is

_REPEATED = {"reasoning", "text", "tool_choice", "tools"}


def responses_router(context: ApiContext) -> APIRouter:
    """The endpoint, for an application."""
    router = APIRouter()

    async def create_response(request: Request) -> Response:
        record_of(request.scope).request_id = new_id("resp-")
        fields = await read_fields(request, ResponsesRequest, context.limits.max_body_bytes)
        generation = fields.generation
        identity = identify(request, context, generation, numbers_events=True)
        check_model(context, fields.model)
        grammar = await wanted_grammar(fields.response_format, None, context.grammars)
        limit, logprobs = fields.max_output_tokens, fields.logprobs_count
        wish = OutputWish(limit, None, logprobs, "input", grammar)
        asked = conversation_of(fields)
        try:
            planned = await plan_conversation(context, identity, asked, generation, wish)
        except PromptTooLong:
            if fields.truncation != "auto":
                raise
            shorter = await truncated(context, asked, limit)
            planned = await plan_conversation(context, identity, shorter, generation, wish)
        blank = blank_response(identity.request_id, identity.created, fields)
        answer_format = ResponseFormat(
            blank, planned.parsers[0], context.tokenizer, logprobs is not None
        )
        style = StreamStyle(frame=as_it_is, done=b"", error=answer_format.failure)
        plan = Plan(identity, generation, planned.choices)
        return await reply(request, context, plan, answer_format, style)

    router.add_api_route("/v1/responses", create_response, methods=["POST"])
    return router


def blank_response(request_id: str, created: int, fields: ResponsesRequest) -> api.Response:
    """The response before it has output; it repeats the request's fields."""
    shown = fields.model_dump(mode="json", by_alias=True, exclude_none=True, include=_REPEATED)
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
        tools=[{"parameters": None, "strict": False, **tool} for tool in shown.get("tools", [])],
        top_p=fields.top_p,
        user=fields.user,
        prompt_cache_key=fields.prompt_cache_key,
        safety_identifier=fields.safety_identifier,
        top_logprobs=fields.top_logprobs or 0,
        truncation=fields.truncation or "disabled",
    )
