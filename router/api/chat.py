"""`POST /v1/chat/completions`: the assistant's next message in a conversation."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response

from protocol.errors import InvalidRequest
from router.api.chat_request import ChatRequest
from router.api.context import ApiContext
from router.api.logprobs import chat_logprobs
from router.api.plan import ChoicePlanner, EncodedPrompt, OutputWish, check_model
from router.api.reply import reply
from router.api.request_fields import read_fields
from router.api.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessageBody,
    Usage,
)
from router.choices import Choice
from router.output import TextDelta
from router.request_scope import record_of
from router.tokenizer import Tokenizer


def chat_router(context: ApiContext) -> APIRouter:
    """The endpoint, for an application."""
    router = APIRouter()

    async def create_chat_completion(request: Request) -> Response:
        request_id = record_of(request.scope).request_id = f"chatcmpl-{uuid.uuid4().hex}"
        fields = await read_fields(request, ChatRequest, context.limits.max_body_bytes)
        check_model(context, fields.model)
        tokenizer = context.tokenizer
        prompt = EncodedPrompt(await tokenizer.in_thread(lambda: _encode(tokenizer, fields)))
        wish = OutputWish(fields.output_limit, None, fields.logprobs_count, "messages")
        choices = ChoicePlanner(context, request_id, fields, wish).plan([prompt])
        answer_format = ChatFormat(
            request_id, int(time.time()), context.model.name, tokenizer, fields
        )
        return await reply(request, context, fields, choices, answer_format)

    router.add_api_route("/v1/chat/completions", create_chat_completion, methods=["POST"])
    return router


def _encode(tokenizer: Tokenizer, fields: ChatRequest) -> list[int]:
    """Token ids of the rendered conversation; the template itself writes the special tokens."""
    template = tokenizer.chat_template
    if template is None:
        raise InvalidRequest(
            "the model has no chat template; use /v1/completions instead", "messages"
        )
    messages = [message.for_template(template.knows_developer_role) for message in fields.messages]
    wants_prompt = fields.add_generation_prompt is not False
    text = template.render(messages, wants_prompt, fields.chat_template_kwargs)
    return tokenizer.encode(text, add_special_tokens=False)


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """JSON of one request's answer, whole or in chunks."""

    request_id: str
    created: int
    model: str
    tokenizer: Tokenizer
    fields: ChatRequest

    def chunk(self, choice: Choice, delta: TextDelta, is_first: bool) -> bytes:
        """See AnswerFormat. The first chunk of a choice names the role, whatever its text."""
        part = ChatChunkChoice(
            index=choice.index,
            delta=ChatDelta(
                role="assistant" if is_first else UNSET,
                content=delta.text if delta.text or is_first else UNSET,
            ),
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish.value if delta.finish else None,
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
            )
        )

    def usage_chunk(self, usage: Usage) -> bytes:
        """See AnswerFormat."""
        return msgspec.json.encode(
            ChatChunk(self.request_id, self.created, self.model, [], usage=usage)
        )

    def answer(self, texts: Sequence[tuple[Choice, TextDelta]], usage: Usage) -> bytes:
        """See AnswerFormat."""
        choices = [
            ChatChoice(
                index=choice.index,
                message=ChatMessageBody(text.text),
                logprobs=self._logprobs(text),
                finish_reason=text.finish.value if text.finish else None,
                token_ids=text.token_ids if self.fields.return_token_ids else UNSET,
            )
            for choice, text in texts
        ]
        prompt = texts[0][0].request.token_ids
        return msgspec.json.encode(
            ChatCompletion(
                self.request_id,
                self.created,
                self.model,
                choices,
                usage,
                prompt_token_ids=prompt if self.fields.return_token_ids else UNSET,
            )
        )

    def _logprobs(self, delta: TextDelta) -> ChatLogprobs | None:
        if not self.fields.logprobs:
            return None
        return chat_logprobs(delta.tokens, self.tokenizer)
