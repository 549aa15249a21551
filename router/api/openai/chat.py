"""`POST /v1/chat/completions`: the assistant's next message in a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from router.api.context import ApiContext
from router.api.conversation_plan import plan_conversation
from router.api.openai.answers import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessageBody,
    ChatToolCall,
    FunctionCall,
    PromptTokenLogprobs,
    Usage,
)
from router.api.openai.chat_request import ChatRequest
from router.api.openai.chunk_frame import TextFrame
from router.api.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from router.api.plan import OutputWish, check_model
from router.api.reply import Plan, reply
from router.api.request_fields import read_fields
from router.api.stream_identity import identify
from router.api.structured_outputs import wanted_grammar
from router.chat.events import ContentText, JoinedCall, MessageDelta, joined_calls
from router.chat.message_parser import MessageParser
from router.http.request_scope import new_id, record_of
from router.requests.choices import Choice
from router.requests.output_text import TextDelta
from router.text.bad_words import bad_word_tokens
from router.text.tokenizer import Tokenizer


def chat_router(context: ApiContext) -> APIRouter:
    """The endpoint, for an application."""
    router = APIRouter()

    async def create_chat_completion(request: Request) -> Response:
        record_of(request.scope).request_id = new_id("chatcmpl-")
        fields = await read_fields(request, ChatRequest, context.limits.max_body_bytes)
        identity = identify(request, context, fields)
        check_model(context, fields.model)
        grammar = await wanted_grammar(
            fields.response_format, fields.structured_outputs, context.grammars
        )
        bad_words = await bad_word_tokens(context.tokenizer, fields.bad_words or ())
        wish = OutputWish(
            fields.output_limit,
            None,
            fields.logprobs_count,
            "messages",
            grammar,
            bad_words,
            fields.prompt_logprobs,
            fields.n or 1,
        )
        planned = await plan_conversation(context, identity, fields.conversation, fields, wish)
        answer_format = ChatFormat(
            fields.answer_id(identity.request_id),
            identity.created,
            context.model.name,
            context.tokenizer,
            fields,
            planned.parsers,
        )
        plan = Plan(identity, fields, planned.choices)
        return await reply(request, context, plan, answer_format)

    router.add_api_route("/v1/chat/completions", create_chat_completion, methods=["POST"])
    return router


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """JSON of one request's answer, whole or in chunks; `parsers` are indexed by choice."""

    request_id: str
    created: int
    model: str
    tokenizer: Tokenizer
    fields: ChatRequest
    parsers: Sequence[MessageParser]
    frames: dict[int, TextFrame] = field(default_factory=dict)

    def chunk(self, choice: Choice, delta: TextDelta, is_first: bool) -> bytes:
        """See AnswerFormat. The first chunk of a choice always names the role."""
        message = self._parsed(choice, delta)
        text = None if is_first else message.only_content
        if text is None or self.fields.logprobs or self.fields.return_token_ids:
            return self._chunk(choice, delta, is_first, message)
        frame = self.frames.get(choice.index)
        if frame is None:
            frame = self.frames[choice.index] = TextFrame(
                lambda hole: self._chunk(choice, delta, False, MessageDelta([ContentText(hole)]))
            )
        return frame.fill(text)

    def _parsed(self, choice: Choice, delta: TextDelta) -> MessageDelta:
        """The parsed delta, without reasoning if the client excludes it."""
        message = self.parsers[choice.index].push(delta)
        return message.answer_alone if self.fields.include_reasoning is False else message

    def _chunk(
        self, choice: Choice, delta: TextDelta, is_first: bool, message: MessageDelta
    ) -> bytes:
        part = ChatChunkChoice(
            index=choice.index,
            delta=_delta(message, is_first),
            logprobs=self._logprobs(delta),
            finish_reason=message.finish,
            stop_reason=choice.output.stop_reason if message.finish else UNSET,
            token_ids=delta.token_ids if self.fields.return_token_ids else UNSET,
        )
        with_prompt = self.fields.return_token_ids and is_first and choice.index == 0
        return msgspec.json.encode(
            ChatChunk(
                self.request_id,
                self.created,
                self.model,
                [part],
                usage=None if self.fields.wants_usage else UNSET,
                prompt_token_ids=choice.request.token_ids if with_prompt else UNSET,
                prompt_logprobs=self._prompt_logprobs(choice, delta),
                service_tier=self._service_tier,
            )
        )

    def usage_chunk(self, usage: Usage) -> bytes:
        """See AnswerFormat."""
        return msgspec.json.encode(
            ChatChunk(
                self.request_id,
                self.created,
                self.model,
                [],
                usage=usage,
                service_tier=self._service_tier,
            )
        )

    def answer(self, texts: Sequence[tuple[Choice, TextDelta]], usage: Usage) -> bytes:
        """See AnswerFormat."""
        choices = [self._choice(choice, text) for choice, text in texts]
        prompt = texts[0][0].request.token_ids
        return msgspec.json.encode(
            ChatCompletion(
                self.request_id,
                self.created,
                self.model,
                choices,
                usage,
                prompt_token_ids=prompt if self.fields.return_token_ids else UNSET,
                prompt_logprobs=self._prompt_logprobs(*texts[0]),
                service_tier=self._service_tier,
            )
        )

    def _prompt_logprobs(self, choice: Choice, text: TextDelta) -> PromptTokenLogprobs | UnsetType:
        count, told = self.fields.prompt_logprobs, text.prompt_logprobs
        if count is None or told is None:
            return UNSET
        return prompt_logprobs(choice.request.token_ids, told, count, self.tokenizer)

    @property
    def _service_tier(self) -> Literal["default"] | UnsetType:
        return "default" if self.fields.service_tier else UNSET

    def _choice(self, choice: Choice, text: TextDelta) -> ChatChoice:
        message = self._parsed(choice, text)
        return ChatChoice(
            index=choice.index,
            message=_body(message),
            logprobs=self._logprobs(text),
            finish_reason=message.finish,
            stop_reason=choice.output.stop_reason,
            token_ids=text.token_ids if self.fields.return_token_ids else UNSET,
        )

    def _logprobs(self, delta: TextDelta) -> ChatLogprobs | None:
        if not self.fields.logprobs:
            return None
        names = TokenNames(self.tokenizer, bool(self.fields.return_tokens_as_token_ids))
        return chat_logprobs(delta.tokens, names)


def _delta(message: MessageDelta, is_first: bool) -> ChatDelta:
    content, reasoning = message.content, message.reasoning
    calls = joined_calls(message.events)
    return ChatDelta(
        role="assistant" if is_first else UNSET,
        content=content if content or is_first else UNSET,
        reasoning_content=reasoning or UNSET,
        reasoning=reasoning or UNSET,
        tool_calls=[_call_delta(call) for call in calls] or UNSET,
    )


def _call_delta(call: JoinedCall) -> ChatToolCall:
    if call.begin is None:
        return ChatToolCall(FunctionCall(call.arguments), index=call.index)
    function = FunctionCall(call.arguments, call.begin.name)
    return ChatToolCall(function, call.index, call.begin.id, "function")


def _body(message: MessageDelta) -> ChatMessageBody:
    calls = [
        ChatToolCall(
            FunctionCall(call.arguments, call.begin.name), id=call.begin.id, type="function"
        )
        for call in joined_calls(message.events)
        if call.begin is not None
    ]
    return ChatMessageBody(
        content=message.content or (None if calls else ""),
        reasoning_content=message.reasoning or UNSET,
        reasoning=message.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )
