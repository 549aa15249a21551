"""`POST /v1/responses`, for OpenAI's clients."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from gateway.api.answer_scopes import counting_scope
from gateway.api.body_reader import read_body
from gateway.api.chat_prompt import drop_unread, encode_conversation, plan_conversation
from gateway.api.choice_planner import check_model
from gateway.api.constraints.answer_grammar import wanted_grammar
from gateway.api.context import ApiContext
from gateway.api.openai_responses import answer as api
from gateway.api.openai_responses.answer_format import ResponseFormat
from gateway.api.openai_responses.background import BackgroundRuns
from gateway.api.openai_responses.conversation import conversation_of
from gateway.api.openai_responses.input_items import Item
from gateway.api.openai_responses.kept_items import items_of, kept_json, read_items
from gateway.api.openai_responses.memory import is_response_id
from gateway.api.openai_responses.references import NO_MEMORY, with_items
from gateway.api.openai_responses.request import InputTokensRequest, ResponsesRequest
from gateway.api.openai_responses.truncation import truncated
from gateway.api.openai_responses.unattended import Keeping, ResponseEnd, UnattendedRun
from gateway.api.output_limit import OutputWish
from gateway.api.replies.plan import Plan
from gateway.api.replies.reply import reply
from gateway.api.stream_identity import identify
from gateway.api.strict_model import check_bounds
from gateway.chat.conversation import Conversation
from gateway.http.request_scope import record_of
from gateway.output.event_ids import StreamIdentity
from gateway.text.bad_words import bad_word_tokens
from http_kit.caller import owner_of
from http_kit.sse import StreamStyle, as_it_is
from process.store.response_records import ResponseName
from protocol.errors import InvalidRequest, PreviousNotFound, PromptTooLong

_Fields = TypeVar("_Fields", bound=InputTokensRequest)
_REPEATED = {"reasoning", "text", "tool_choice", "tools"}


def responses_router(context: ApiContext, runs: BackgroundRuns | None) -> APIRouter:
    """The endpoints, for an application; without `runs` nothing is kept."""
    router = APIRouter()

    async def create_response(request: Request) -> Response:
        record_of(request.scope).use_prefix("resp_")
        fields = await read_body(request, context, ResponsesRequest)
        generation = fields.generation
        identity = identify(request, context, generation, numbers_events=True)
        check_model(context, fields.model)
        wish = await _wish(request, context, fields)
        logprobs = fields.logprobs_count
        fields = await with_items(request, context, runs, fields)
        continued, history = await _with_history(request, context, runs, fields)
        asked = await _conversation(request, context, continued)
        plan_of = partial(
            plan_conversation, context, request.scope, identity, fields=generation, wish=wish
        )
        try:
            planned = await plan_of(asked)
        except PromptTooLong:
            if fields.truncation != "auto":
                raise
            planned = await plan_of(await truncated(context, asked, wish.requested_tokens))
        keeping = _keeping(request, context, runs, fields, history)
        blank = blank_response(identity, fields, context.model.name, keeping is not None)
        end = ResponseEnd(keeping)
        answer_format = ResponseFormat(
            blank, planned.parsers[0], context.tokenizer, logprobs is not None, end.take
        )
        style = StreamStyle(frame=as_it_is, done=b"", error=answer_format.failure)
        plan = Plan(identity, generation, planned.choices, repeats_output=logprobs is not None)
        if fields.background and keeping is not None:
            run = UnattendedRun(context, plan, answer_format, end)
            return await run.start(request.scope, keeping, blank)
        return await reply(request, context, plan, answer_format, style)

    async def count_input_tokens(request: Request) -> Response:
        fields = await read_body(request, context, InputTokensRequest)
        if fields.model is not None:
            check_model(context, fields.model)
        fields = await with_items(request, context, runs, fields)
        continued, _ = await _with_history(request, context, runs, fields)
        asked = await _conversation(request, context, continued)
        scope = counting_scope(request.scope, fields.cache_salt)
        count = len((await encode_conversation(context, asked, scope))[1])
        return _json(msgspec.json.encode(api.InputTokens(count)))

    router.add_api_route("/v1/responses", create_response, methods=["POST"])
    router.add_api_route("/v1/responses/input_tokens", count_input_tokens, methods=["POST"])
    return router


async def _wish(request: Request, context: ApiContext, fields: ResponsesRequest) -> OutputWish:
    grammar = await wanted_grammar(fields.constraints, context, request.scope)
    bad_words = await bad_word_tokens(context.tokenizer, fields.bad_words or ())
    return OutputWish(
        fields.output_limit,
        None,
        fields.logprobs_count,
        "input",
        grammar,
        bad_words,
        repeats_output=True,
        may_be_kept=fields.store is not False,
    )


async def _conversation(
    request: Request, context: ApiContext, fields: InputTokensRequest
) -> Conversation:
    asked = await context.convert(request.scope, lambda: conversation_of(fields))
    return drop_unread(context, request.scope, asked, ("reasoning.effort",))


def _json(document: bytes) -> Response:
    return Response(document, media_type="application/json")


async def _with_history(
    request: Request, context: ApiContext, runs: BackgroundRuns | None, fields: _Fields
) -> tuple[_Fields, bytes]:
    """The request with the whole conversation as its input, and the JSON of the items that came
    from a previous response. Raises InvalidRequest, PreviousNotFound, and StoreTrouble."""
    previous = fields.previous_response_id
    if previous is None:
        return fields, b""
    if runs is None:
        raise InvalidRequest(f"'previous_response_id': {NO_MEMORY}", "previous_response_id")
    if not is_response_id(previous):
        raise PreviousNotFound(previous)
    history = await runs.memory.history(ResponseName(owner_of(request.scope), previous))
    record = record_of(request.scope)
    record.take_body(len(history))

    def read() -> list[Item]:
        record.hold(check_bounds(history))
        return [*read_items(history), *items_of(fields.input)]

    items = await context.convert(request.scope, read)
    return fields.model_copy(update={"input": items}), history


def _keeping(
    request: Request,
    context: ApiContext,
    runs: BackgroundRuns | None,
    fields: ResponsesRequest,
    history: bytes,
) -> Keeping | None:
    """How the response will be kept; None if it will not be. Raises InvalidRequest for a response
    in the background that cannot be kept."""
    record = record_of(request.scope)
    if runs is None:
        if fields.background:
            raise InvalidRequest(f"'background': {NO_MEMORY}", "background")
        if fields.store:
            context.ignore(request.scope, ["store"], NO_MEMORY)
        return None
    if fields.store is False:
        return None
    name = ResponseName(owner_of(request.scope), record.request_id)
    if not fields.background and runs.memory.why_not(record.body_bytes) is not None:
        context.name_ignored(request.scope, ["store"])
        return None
    return Keeping(
        runs, name, record.body_bytes, lambda: kept_json(history, items_of(fields.input))
    )


def blank_response(
    identity: StreamIdentity, fields: ResponsesRequest, model: str, is_kept: bool
) -> api.Response:
    """The response before it has output. It repeats the request's fields, except for the
    `model`."""
    shown = fields.model_dump(mode="json", by_alias=True, exclude_none=True, include=_REPEATED)
    tools = [each for each in shown.get("tools", []) if each["type"] == "function"]
    return api.Response(
        id=identity.request_id,
        created_at=identity.created,
        status="in_progress",
        background=bool(fields.background),
        previous_response_id=fields.previous_response_id,
        store=is_kept,
        model=model,
        output=[],
        instructions=fields.instructions,
        max_output_tokens=fields.output_limit,
        metadata=fields.metadata or {},
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
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
