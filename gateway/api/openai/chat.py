"""`POST /v1/chat/completions`: the assistant's next message in a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from gateway.api.body_reader import read_body
from gateway.api.chat_prompt import drop_unread, plan_conversation
from gateway.api.choice_planner import check_model
from gateway.api.constraints.answer_grammar import wanted_grammar
from gateway.api.context import ApiContext
from gateway.api.openai.answers import (
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
)
from gateway.api.openai.chat_request import ChatRequest
from gateway.api.openai.chunk_frame import TextFrame
from gateway.api.openai.legacy_functions import legacy_body, legacy_delta, legacy_finish
from gateway.api.openai.logprobs import (
    TokenNames,
    chat_logprobs,
    long_chat_logprobs,
    prompt_logprobs,
)
from gateway.api.output_limit import OutputWish
from gateway.api.replies.json_pieces import Holes, list_of
from gateway.api.replies.plan import Plan
from gateway.api.replies.reply import reply
from gateway.api.replies.usage import Usage
from gateway.api.stream_identity import identify
from gateway.chat.message_events import ContentText, JoinedCall, MessageDelta, joined_calls
from gateway.chat.message_parser import MessageParser
from gateway.http.request_scope import record_of
from gateway.output.choices import Choice
from gateway.output.output_text import TextDelta
from gateway.text.bad_words import bad_word_tokens
from gateway.text.tokenizer import Tokenizer


def chat_router(context: ApiContext) -> APIRouter:
    """The endpoint, for an application."""
    router = APIRouter()

    async def create_chat_completion(request: Request) -> Response:
        record_of(request.scope).use_prefix("chatcmpl-")
        fields = await read_body(request, context, ChatRequest)
        identity = identify(request, context, fields)
        check_model(context, fields.model)
        grammar = bad_words = None
        if constraints := fields.constraints:
            grammar = await wanted_grammar(constraints, context, request.scope)
        if fields.bad_words:
            bad_words = await bad_word_tokens(context.tokenizer, fields.bad_words)
        num_choices = fields.n or 1
        wish = OutputWish(
            fields.output_limit,
            None,
            fields.logprobs_count,
            "messages",
            grammar,
            bad_words or (),
            fields.prompt_logprobs,
            num_choices,
            prompt_copies=num_choices if fields.stream else 1,
            may_be_kept=fields.store is not False,
        )
        conversation = await context.convert(request.scope, lambda: fields.conversation)
        conversation = drop_unread(context, request.scope, conversation, ("reasoning_effort",))
        planned = await plan_conversation(
            context, request.scope, identity, conversation, fields, wish
        )
        answer_format = ChatFormat(
            fields.answer_id(identity.request_id),
            identity.created,
            context.model.name,
            context.tokenizer,
            fields,
            planned.parsers,
            is_text=not (fields.logprobs or fields.return_token_ids),
        )
        plan = Plan(identity, fields, planned.choices)
        return await reply(request, context, plan, answer_format)

    router.add_api_route("/v1/chat/completions", create_chat_completion, methods=["POST"])
    return router


class ChatFormat(msgspec.Struct, frozen=True):
    """JSON of one request's answer, whole or in chunks; `parsers` are indexed by choice."""

    request_id: str
    created: int
    model: str
    tokenizer: Tokenizer
    fields: ChatRequest
    parsers: Sequence[MessageParser]
    is_text: bool
    """Whether chunks carry text alone, without log-probabilities or token ids."""
    frames: dict[int, TextFrame] = {}

    def chunk(self, choice: Choice, delta: TextDelta, is_first: bool) -> bytes:
        """See AnswerFormat. The first chunk of a choice always names the role; a later one without
        new content is ""."""
        is_text = self.is_text and not is_first
        text = self.parsers[choice.index].push_plain(delta) if is_text else None
        if text is None:
            message = self._parsed(choice, delta)
            text = message.only_content if is_text else None
            if text is None:
                says_more = message.events or message.finish or is_first or self._reports(delta)
                return self._chunk(choice, delta, is_first, message) if says_more else b""
        if not text:
            return b""
        frame = self.frames.get(choice.index)
        if frame is None:
            frame = self.frames[choice.index] = TextFrame(
                lambda hole: self._chunk(choice, delta, False, MessageDelta([ContentText(hole)]))
            )
        return frame.fill(text)

    def _reports(self, delta: TextDelta) -> bool:
        """Whether a chunk carries more than the text of its tokens."""
        return bool(self.fields.return_token_ids or (self.fields.logprobs and delta.tokens))

    def _parsed(self, choice: Choice, delta: TextDelta) -> MessageDelta:
        """The parsed delta, without reasoning if the client excludes it."""
        message = self.parsers[choice.index].push(delta)
        return message.answer_alone if self.fields.include_reasoning is False else message

    def _chunk(
        self, choice: Choice, delta: TextDelta, is_first: bool, message: MessageDelta
    ) -> bytes:
        return msgspec.json.encode(self._chunk_struct(choice, delta, is_first, message, UNSET))

    def long_chunk(self, choice: Choice, delta: TextDelta, is_first: bool) -> Iterator[bytes]:
        """See AnswerFormat."""
        holes, message = Holes(), self._parsed(choice, delta)
        entries = self._prompt_logprobs(choice, delta, holes)
        return holes.pieces(self._chunk_struct(choice, delta, is_first, message, entries))

    def _chunk_struct(
        self,
        choice: Choice,
        delta: TextDelta,
        is_first: bool,
        message: MessageDelta,
        entries: PromptTokenLogprobs | UnsetType,
    ) -> ChatChunk:
        logprobs = chat_logprobs(delta.tokens, self._names) if self.fields.logprobs else None
        is_legacy = self.fields.is_legacy
        shown = _delta(message, is_first, self.fields.may_call_tools)
        part = ChatChunkChoice(
            index=choice.index,
            delta=legacy_delta(shown) if is_legacy else shown,
            logprobs=logprobs,
            finish_reason=legacy_finish(message.finish) if is_legacy else message.finish,
            stop_reason=choice.output.stop_reason if message.finish else UNSET,
            token_ids=delta.token_ids if self.fields.return_token_ids else UNSET,
        )
        with_prompt = self.fields.return_token_ids and is_first and choice.index == 0
        return ChatChunk(
            self.request_id,
            self.created,
            self.model,
            [part],
            usage=None if self.fields.wants_usage else UNSET,
            prompt_token_ids=choice.request.token_ids if with_prompt else UNSET,
            prompt_logprobs=entries,
            service_tier=self._service_tier,
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

    def answer(self, texts: Sequence[tuple[Choice, TextDelta]], usage: Usage) -> Iterator[bytes]:
        """See AnswerFormat."""
        holes, prompt = Holes(), texts[0][0].request.token_ids
        if len(texts) == 1 and not self.fields.logprobs:
            choices: Any = [self._choice_struct(*texts[0], None)]
        else:
            choices = holes.put(
                list_of(self._choice_pieces(choice, text) for choice, text in texts)
            )
        return holes.pieces(
            ChatCompletion(
                self.request_id,
                self.created,
                self.model,
                choices,
                usage,
                prompt_token_ids=prompt if self.fields.return_token_ids else UNSET,
                prompt_logprobs=self._prompt_logprobs(*texts[0], holes),
                service_tier=self._service_tier,
            )
        )

    def _prompt_logprobs(
        self, choice: Choice, text: TextDelta, holes: Holes
    ) -> PromptTokenLogprobs | UnsetType:
        count, packed = self.fields.prompt_logprobs, text.prompt_logprobs
        if count is None or packed is None:
            return UNSET
        filling = prompt_logprobs(choice.request.token_ids, packed, count, self.tokenizer)
        listed: PromptTokenLogprobs = holes.put(filling)
        return listed

    @property
    def _names(self) -> TokenNames:
        return TokenNames(self.tokenizer, bool(self.fields.return_tokens_as_token_ids))

    @property
    def _service_tier(self) -> Literal["default"] | UnsetType:
        return "default" if self.fields.service_tier else UNSET

    def _choice_pieces(self, choice: Choice, text: TextDelta) -> Iterator[bytes]:
        holes, logprobs = Holes(), None
        if self.fields.logprobs:
            logprobs = long_chat_logprobs(text.tokens, self._names, holes)
        return holes.pieces(self._choice_struct(choice, text, logprobs))

    def _choice_struct(
        self, choice: Choice, text: TextDelta, logprobs: ChatLogprobs | None
    ) -> ChatChoice:
        message, is_legacy = self._parsed(choice, text), self.fields.is_legacy
        return ChatChoice(
            index=choice.index,
            message=legacy_body(_body(message)) if is_legacy else _body(message),
            logprobs=logprobs,
            finish_reason=legacy_finish(message.finish) if is_legacy else message.finish,
            stop_reason=choice.output.stop_reason,
            token_ids=text.token_ids if self.fields.return_token_ids else UNSET,
        )


def _delta(message: MessageDelta, is_first: bool, may_call: bool) -> ChatDelta:
    """The delta of a chunk. The first one has a content, unless the answer may be calls alone."""
    content, reasoning = message.content, message.reasoning
    calls = joined_calls(message.events)
    return ChatDelta(
        role="assistant" if is_first else UNSET,
        content=content if content or (is_first and not may_call) else UNSET,
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
    reasoning = message.reasoning or UNSET
    return ChatMessageBody(
        content=message.content or (None if calls else ""),
        reasoning_content=reasoning,
        reasoning=reasoning,
        tool_calls=calls or UNSET,
    )
