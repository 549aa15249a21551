"""`POST /v1/completions`: text continued from a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from router.api.context import ApiContext
from router.api.openai.answers import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptTokenLogprobs,
    Usage,
)
from router.api.openai.chunk_frame import TextFrame
from router.api.openai.completion_request import CompletionRequest, Prompt
from router.api.openai.logprobs import (
    EchoedPrompt,
    TokenNames,
    completion_logprobs,
    echoed_logprobs,
    joined_logprobs,
    prompt_logprobs,
)
from router.api.plan import ChoicePlanner, EncodedPrompt, OutputWish, check_length, check_model
from router.api.reply import Plan, reply
from router.api.request_fields import read_fields
from router.api.stream_identity import identify
from router.api.structured_outputs import wanted_grammar
from router.http.request_scope import new_id, record_of
from router.requests.choices import Choice
from router.requests.output_text import TextDelta
from router.text.bad_words import bad_word_tokens
from router.text.fill_in_middle import fill_in_middle
from router.text.tokenizer import CHARS_PER_TOKEN, Tokenizer

DEFAULT_MAX_TOKENS = 16


def completions_router(context: ApiContext) -> APIRouter:
    """The endpoint, for an application."""
    router = APIRouter()

    async def create_completion(request: Request) -> Response:
        record_of(request.scope).request_id = new_id("cmpl-")
        fields = await read_fields(request, CompletionRequest, context.limits.max_body_bytes)
        identity = identify(request, context, fields)
        check_model(context, fields.model)
        prompts = [await _encode(context, fields, each) for each in fields.prompts]
        grammar = await wanted_grammar(
            fields.response_format, fields.structured_outputs, context.grammars
        )
        bad_words = await bad_word_tokens(context.tokenizer, fields.bad_words or ())
        wish = OutputWish(
            fields.max_tokens,
            DEFAULT_MAX_TOKENS,
            fields.output_logprobs,
            "prompt",
            grammar,
            bad_words,
            fields.scored_alternatives,
            fields.num_candidates,
        )
        choices = ChoicePlanner(context, identity, fields, wish).plan(prompts)
        answer_format = CompletionFormat(
            fields.answer_id(identity.request_id),
            identity.created,
            context.model.name,
            context.tokenizer,
            fields,
        )
        num_best = fields.n or 1
        plan = Plan(identity, fields, choices, num_best if fields.has_spare_choices else None)
        return await reply(request, context, plan, answer_format)

    router.add_api_route("/v1/completions", create_completion, methods=["POST"])
    return router


async def _encode(context: ApiContext, fields: CompletionRequest, prompt: Prompt) -> EncodedPrompt:
    tokenizer = context.tokenizer
    is_long = len(prompt) > CHARS_PER_TOKEN * context.model.max_context
    if is_long and isinstance(prompt, str) and fields.truncate_prompt_tokens is None:
        await tokenizer.in_thread(lambda: check_length(context, prompt, "prompt"))
    if fields.suffix and isinstance(prompt, str):
        token_ids = await tokenizer.in_thread(
            lambda: fill_in_middle(tokenizer, prompt, fields.suffix or "")
        )
        return EncodedPrompt(token_ids)
    if isinstance(prompt, str):
        with_special = fields.add_special_tokens is not False
        token_ids = await tokenizer.encode_async(prompt, with_special)
        return EncodedPrompt(token_ids, prompt if fields.echo else "")
    if not fields.echo:
        return EncodedPrompt(prompt)
    skips_special = fields.skip_special_tokens is not False
    echo = await tokenizer.in_thread(lambda: tokenizer.decode(prompt, skips_special))
    return EncodedPrompt(prompt, echo)


@dataclass(frozen=True, slots=True)
class CompletionFormat:
    """JSON of one request's answer, whole or in chunks (the two differ in `usage` only)."""

    request_id: str
    created: int
    model: str
    tokenizer: Tokenizer
    fields: CompletionRequest
    frames: dict[int, TextFrame] = field(default_factory=dict)

    def chunk(self, choice: Choice, delta: TextDelta, is_first: bool) -> bytes:
        """See AnswerFormat."""
        if is_first or delta.finish or self.fields.logprobs is not None:
            return self._chunk(choice, delta, is_first)
        if self.fields.return_token_ids:
            return self._chunk(choice, delta, is_first)
        frame = self.frames.get(choice.index)
        if frame is None:
            frame = self.frames[choice.index] = TextFrame(
                lambda hole: self._chunk(choice, TextDelta(hole, []), False)
            )
        return frame.fill(delta.text)

    def _chunk(self, choice: Choice, delta: TextDelta, is_first: bool) -> bytes:
        part = self._choice(choice, delta, is_first)
        return self._document([part], None if self.fields.wants_usage else UNSET)

    def usage_chunk(self, usage: Usage) -> bytes:
        """See AnswerFormat."""
        return self._document([], usage)

    def answer(self, texts: Sequence[tuple[Choice, TextDelta]], usage: Usage) -> bytes:
        """See AnswerFormat."""
        parts = [self._choice(choice, text, True) for choice, text in texts]
        return self._document(parts, usage)

    def _document(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> bytes:
        return msgspec.json.encode(
            Completion(self.request_id, self.created, self.model, choices, usage)
        )

    def _choice(self, choice: Choice, delta: TextDelta, is_first: bool) -> CompletionChoice:
        with_ids = bool(self.fields.return_token_ids)
        return CompletionChoice(
            index=choice.index,
            text=choice.echo + delta.text if is_first else delta.text,
            logprobs=self._logprobs(choice, delta),
            finish_reason=delta.finish.value if delta.finish else None,
            stop_reason=choice.output.stop_reason if delta.finish else UNSET,
            token_ids=delta.token_ids if with_ids else UNSET,
            prompt_token_ids=choice.request.token_ids if with_ids and is_first else UNSET,
            prompt_logprobs=self._prompt_logprobs(choice, delta),
        )

    def _logprobs(self, choice: Choice, delta: TextDelta) -> CompletionLogprobs | None:
        """Log-probabilities of the output, preceded by those of an echoed prompt."""
        count, told = self.fields.logprobs, delta.prompt_logprobs
        if count is None:
            return None
        names = TokenNames(self.tokenizer, bool(self.fields.return_tokens_as_token_ids))
        output = completion_logprobs(delta.tokens, names, len(choice.echo))
        if told is None or not self.fields.echo:
            return output
        skips_special = self.fields.skip_special_tokens is not False
        prompt = EchoedPrompt(choice.request.token_ids, choice.echo, skips_special)
        return joined_logprobs(echoed_logprobs(prompt, told, count, names), output)

    def _prompt_logprobs(self, choice: Choice, delta: TextDelta) -> PromptTokenLogprobs | UnsetType:
        count, told = self.fields.prompt_logprobs, delta.prompt_logprobs
        if count is None or told is None:
            return UNSET
        return prompt_logprobs(choice.request.token_ids, told, count, self.tokenizer)
