"""Plans the sequences that one HTTP request starts: its prompts times its choices."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import msgspec

from protocol.errors import InvalidRequest, ModelNotFound, PromptTooLong
from protocol.sampling import SamplingParams
from router.api.context import ApiContext
from router.api.request_fields import GenerationFields
from router.api.sampling import (
    build_sampling,
    check_token_ids,
    check_vocabulary,
    choice_seed,
    output_limit,
    stop_rules,
)
from router.requests.choices import Choice
from router.requests.event_ids import HEADER, StreamIdentity, check_positions
from router.requests.interface import GenerationRequest
from router.requests.output_text import OutputText, StopRules


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as token ids, and as text in `echo` if the answer repeats it.

    `kept_ids` are special tokens whose text the output shows even if special tokens are skipped.
    """

    token_ids: list[int]
    echo: str = ""
    kept_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class OutputWish:
    """The parameters that each kind of request expresses in its own way.

    `default_tokens` is the output limit if `requested_tokens` is None (None: the rest of the
    context). `prompt_param` is the field that holds the prompt. `grammar` constrains the output's
    text. `bad_words` are token sequences that the output must not contain. `prompt_logprobs` is
    the number of alternatives to compute per prompt token, or None for no log-probabilities.
    `num_choices` is the number of sequences generated for each prompt.
    """

    requested_tokens: int | None
    default_tokens: int | None
    logprobs: int | None
    prompt_param: str
    grammar: str | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: int | None = None
    num_choices: int = 1

    @property
    def is_echo_only(self) -> bool:
        """Whether the answer contains no generated tokens."""
        return self.requested_tokens == 0

    @property
    def generated_tokens(self) -> int | None:
        """The limit sent to workers: prompt log-probabilities come with a first output token."""
        if self.is_echo_only and self.prompt_logprobs is not None:
            return 1
        return self.requested_tokens


def check_model(context: ApiContext, name: str) -> None:
    """Raises ModelNotFound unless `name` is the model served here."""
    if name != context.model.name:
        raise ModelNotFound(
            f"the model {name!r} does not exist; this server serves {context.model.name!r}", "model"
        )


def check_length(context: ApiContext, text: str, param: str) -> None:
    """Raises PromptTooLong if the beginning of the prompt alone exceeds the context. A prompt that
    passes may still be too long. This is slow: do not call it on the event loop."""
    most = context.model.max_context
    least = context.tokenizer.least_tokens(text, most)
    if least:
        raise PromptTooLong(
            f"the model's context is {most} tokens, but '{param}' has more than {least}",
            param,
        )


@dataclass(frozen=True, slots=True)
class ChoicePlanner:
    """Turns the prompts of one HTTP request into choices."""

    context: ApiContext
    identity: StreamIdentity
    fields: GenerationFields
    wish: OutputWish

    def plan(self, prompts: list[EncodedPrompt]) -> list[Choice]:
        """All choices, in the order of the answer. Raises RequestError if one cannot be served."""
        check_vocabulary(self.fields, self.context.tokenizer.vocab_size)
        choices: list[Choice] = []
        for prompt_index, whole in enumerate(prompts):
            prompt = self._truncated(whole)
            first = self._sampling(prompt, f"{self.identity.request_id}/{prompt_index}")
            for number in range(self.wish.num_choices):
                seed = choice_seed(first.seed, number)
                index = len(choices)
                told = self.wish.prompt_logprobs if self._tells_prompt(index, number) else None
                sampling = msgspec.structs.replace(first, seed=seed, prompt_logprobs=told)
                place = (index, prompt_index)
                choices.append(self._choice(place, prompt, sampling))
        check_positions(self.identity, [each.request.sampling.max_tokens for each in choices])
        return choices

    def _tells_prompt(self, index: int, number: int) -> bool:
        """Whether a choice reports its prompt's log-probabilities. In a whole answer the prompt's
        first choice reports them for all. In a stream choices do not wait for each other, so
        every choice reports them, unless the client already has tokens of that choice."""
        if self.fields.stream:
            return self.identity.position_of(index).num_tokens == 0
        return number == 0

    def _truncated(self, prompt: EncodedPrompt) -> EncodedPrompt:
        """The prompt cut to `truncate_prompt_tokens`: its end, or with "right" its beginning."""
        kept = self.fields.truncate_prompt_tokens
        if kept is None:
            return prompt
        if kept == -1:
            output = 1 if self.wish.generated_tokens is None else self.wish.generated_tokens
            kept = max(1, self.context.model.max_context - output)
        if self.fields.truncation_side == "right":
            return replace(prompt, token_ids=prompt.token_ids[:kept])
        return replace(prompt, token_ids=prompt.token_ids[-kept:])

    def _sampling(self, prompt: EncodedPrompt, name: str) -> SamplingParams:
        param = self.wish.prompt_param
        if not prompt.token_ids:
            raise InvalidRequest(f"'{param}' must not be empty: it has no tokens", param)
        check_token_ids(prompt.token_ids, self.context.tokenizer.vocab_size, param)
        max_tokens = output_limit(
            len(prompt.token_ids),
            self.wish.generated_tokens,
            self.wish.default_tokens,
            self.context.model.max_context,
            param,
        )
        sampling = build_sampling(
            self.fields, self.context.defaults, max_tokens, self.wish.logprobs, name
        )
        return msgspec.structs.replace(
            sampling, grammar=self.wish.grammar, bad_words=self.wish.bad_words
        )

    def _choice(
        self, place: tuple[int, int], prompt: EncodedPrompt, sampling: SamplingParams
    ) -> Choice:
        index, prompt_index = place
        tokenizer = self.context.tokenizer
        skips_special = self.fields.skip_special_tokens is not False
        has_text = any(token_id not in tokenizer.special_ids for token_id in prompt.token_ids)
        detokenizer = tokenizer.detokenizer(skips_special, not has_text, prompt.kept_ids)
        return Choice(
            index=index,
            prompt_index=prompt_index,
            request=GenerationRequest(
                request_id=f"{self.identity.request_id}-{index}",
                token_ids=prompt.token_ids,
                sampling=sampling,
                priority=-(self.fields.priority or 0),  # in the API, lower is earlier
                deadline_ms=self._deadline_ms(),
                cache_salt=self.fields.cache_salt or "",
                # prompt log-probabilities are not kept with the tokens
                is_resumable=bool(self.fields.stream) and sampling.prompt_logprobs is None,
                life=self.identity.life,
            ),
            output=OutputText(detokenizer, self._stop_rules(sampling)),
            echo=prompt.echo,
            is_echo_only=self.wish.is_echo_only,
            known=self.identity.position_of(index),
            by_token=bool(self.fields.stream) and self.identity.numbers_events,
        )

    def _stop_rules(self, sampling: SamplingParams) -> StopRules:
        return stop_rules(self.fields, sampling, self.context.defaults)

    def _deadline_ms(self) -> int:
        """The request's remaining time. Raises InvalidRequest if a stream has no time left."""
        remaining_s = self.context.limits.request_timeout_s
        if self.identity.life:
            remaining_s -= max(0.0, time.time() - self.identity.created)
        if remaining_s <= 0:
            raise InvalidRequest(f"'{HEADER}': the time of this stream is over", HEADER)
        return max(1, round(remaining_s * 1000))
