"""`POST /v1/completions`: text continued from a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from gateway.api.answer_scopes import restore, scope_of
from gateway.api.body_reader import read_body
from gateway.api.choice_planner import (
    ChoicePlanner,
    EncodedPrompt,
    check_length,
    check_model,
    check_text_length,
)
from gateway.api.constraints.answer_grammar import wanted_grammar
from gateway.api.context import ApiContext
from gateway.api.openai.answers import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptTokenLogprobs,
)
from gateway.api.openai.chunk_frame import TextFrame
from gateway.api.openai.completion_request import CompletionRequest, Prompt
from gateway.api.openai.logprobs import (
    EchoedLogprobs,
    EchoedPrompt,
    TokenNames,
    completion_logprobs,
    long_completion_logprobs,
    prompt_logprobs,
)
from gateway.api.output_limit import OutputWish
from gateway.api.replies.json_pieces import Holes, list_of
from gateway.api.replies.plan import Plan
from gateway.api.replies.reply import reply
from gateway.api.replies.usage import Usage
from gateway.api.stream_identity import identify
from gateway.http.request_scope import record_of
from gateway.output.choices import Choice
from gateway.output.event_ids import StreamIdentity
from gateway.output.output_text import TextDelta
from gateway.text.bad_words import bad_word_tokens
from gateway.text.fill_in_middle import fill_in_middle
from gateway.text.tokenizer import CHARS_PER_TOKEN, Tokenizer
from protocol.errors import PromptTooLong

DEFAULT_MAX_TOKENS = 16


def completions_router(context: ApiContext) -> APIRouter:
    """The endpoint, for an application."""
    router = APIRouter()

    async def create_completion(request: Request) -> Response:
        record_of(request.scope).use_prefix("cmpl-")
        fields = await read_body(request, context, CompletionRequest)
        identity = identify(request, context, fields)
        check_model(context, fields.model)
        prompts = [await _encode(context, identity, fields, each) for each in fields.prompts]
        grammar = await wanted_grammar(fields.constraints, context, request.scope)
        bad_words = await bad_word_tokens(context.tokenizer, fields.bad_words or ())
        wish = OutputWish(
            fields.output_limit,
            DEFAULT_MAX_TOKENS,
            fields.output_logprobs,
            "prompt",
            grammar,
            bad_words,
            fields.scored_alternatives,
            fields.num_candidates,
            prompt_copies=fields.n or 1,
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


async def _encode(
    context: ApiContext, identity: StreamIdentity, fields: CompletionRequest, prompt: Prompt
) -> EncodedPrompt:
    tokenizer = context.tokenizer
    is_long = len(prompt) > CHARS_PER_TOKEN * context.model.max_context
    if isinstance(prompt, str):
        check_text_length(context, prompt, "prompt")
        check_text_length(context, fields.suffix or "", "suffix")
        if is_long and fields.truncate_prompt_tokens is None:
            await tokenizer.in_steps(check_length(context, prompt, "prompt"), len(prompt))
    elif fields.truncate_prompt_tokens is None and len(prompt) > context.model.max_context:
        raise PromptTooLong(context.model.max_context, len(prompt), param="prompt")
    if fields.suffix and isinstance(prompt, str):
        suffix = fields.suffix
        token_ids = await tokenizer.in_thread(
            lambda: fill_in_middle(tokenizer, prompt, suffix), len(prompt) + len(suffix)
        )
        return EncodedPrompt(token_ids)
    if isinstance(prompt, str):
        with_special = fields.add_special_tokens is not False
        plain = await tokenizer.encode_async(prompt, with_special)
        scope = scope_of(identity, fields.cache_salt, is_conversation=False)
        text, token_ids = await restore(context, scope, [prompt], plain)
        return EncodedPrompt(
            token_ids,
            prompt if fields.echo else "",
            is_encoded=True,
            text=None if context.answers is None else text,
        )
    if not fields.echo:
        return EncodedPrompt(prompt)
    skips_special = fields.skip_special_tokens is not False
    echo = await tokenizer.in_steps(tokenizer.decode_steps(prompt, skips_special), len(prompt))
    return EncodedPrompt(prompt, echo)


class CompletionFormat(msgspec.Struct, frozen=True):
    """JSON of one request's answer, whole or in chunks (the two differ in `usage` only)."""

    request_id: str
    created: int
    model: str
    tokenizer: Tokenizer
    fields: CompletionRequest
    frames: dict[int, TextFrame] = {}

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
        logprobs = None
        if self.fields.logprobs is not None:
            logprobs = completion_logprobs(delta.tokens, self._names, len(choice.echo))
        part = self._choice(choice, delta, is_first, logprobs)
        return msgspec.json.encode(self._document([part], self._chunk_usage))

    def long_chunk(self, choice: Choice, delta: TextDelta, is_first: bool) -> Iterator[bytes]:
        """See AnswerFormat."""
        parts = list_of([self._choice_pieces(choice, delta, is_first)])
        holes = Holes()
        return holes.pieces(self._document(holes.put(parts), self._chunk_usage))

    def usage_chunk(self, usage: Usage) -> bytes:
        """See AnswerFormat."""
        return msgspec.json.encode(self._document([], usage))

    def answer(self, texts: Sequence[tuple[Choice, TextDelta]], usage: Usage) -> Iterator[bytes]:
        """See AnswerFormat."""
        parts = list_of(self._choice_pieces(choice, text, True) for choice, text in texts)
        holes = Holes()
        return holes.pieces(self._document(holes.put(parts), usage))

    @property
    def _names(self) -> TokenNames:
        return TokenNames(self.tokenizer, bool(self.fields.return_tokens_as_token_ids))

    @property
    def _chunk_usage(self) -> UnsetType | None:
        return None if self.fields.wants_usage else UNSET

    def _document(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None
    ) -> Completion:
        return Completion(self.request_id, self.created, self.model, choices, usage)

    def _choice(
        self,
        choice: Choice,
        delta: TextDelta,
        is_first: bool,
        logprobs: CompletionLogprobs | None,
        entries: PromptTokenLogprobs | UnsetType = UNSET,
    ) -> CompletionChoice:
        with_ids = bool(self.fields.return_token_ids)
        return CompletionChoice(
            index=choice.index,
            text=choice.echo + delta.text if is_first else delta.text,
            logprobs=logprobs,
            finish_reason=delta.finish.value if delta.finish else None,
            stop_reason=choice.output.stop_reason if delta.finish else UNSET,
            token_ids=delta.token_ids if with_ids else UNSET,
            prompt_token_ids=choice.request.token_ids if with_ids and is_first else UNSET,
            prompt_logprobs=entries,
        )

    def _choice_pieces(self, choice: Choice, delta: TextDelta, is_first: bool) -> Iterator[bytes]:
        """JSON of a choice with all its log-probabilities, those of its prompt included."""
        holes = Holes()
        logprobs = self._long_logprobs(choice, delta, holes)
        count, packed = self.fields.prompt_logprobs, delta.prompt_logprobs
        listed: PromptTokenLogprobs | UnsetType = UNSET
        if count is not None and packed is not None:
            ids = choice.request.token_ids
            listed = holes.put(prompt_logprobs(ids, packed, count, self.tokenizer))
        return holes.pieces(self._choice(choice, delta, is_first, logprobs, listed))

    def _long_logprobs(
        self, choice: Choice, delta: TextDelta, holes: Holes
    ) -> CompletionLogprobs | None:
        """Log-probabilities of the output, behind those of an echoed prompt."""
        fields, packed, echoed = self.fields, delta.prompt_logprobs, None
        if fields.logprobs is None:
            return None
        if packed is not None and fields.echo:
            skips_special = fields.skip_special_tokens is not False
            prompt = EchoedPrompt(choice.request.token_ids, choice.echo, skips_special)
            echoed = EchoedLogprobs(prompt, packed, fields.logprobs, self._names)
        return long_completion_logprobs(delta.tokens, self._names, holes, len(choice.echo), echoed)
