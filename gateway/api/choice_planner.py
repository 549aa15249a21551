"""Plans the sequences that one HTTP request starts: each of its prompts, `n` times.

A sequence becomes a `Choice`, with a request id, a seed and a deadline of its own. Checks that need
the encoded prompts are here: lengths, ids and number of prompts, and how much an answer reports of
them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from gateway.admission.request_terms import TIMEOUT_HEADER
from gateway.api.context import ApiContext
from gateway.api.generation_fields import GenerationFields
from gateway.api.output_limit import OutputWish, min_given, output_limit
from gateway.api.sampling_params import (
    build_sampling,
    check_token_ids,
    check_vocabulary,
    choice_seed,
    stop_rules,
)
from gateway.history.answers import PromptText
from gateway.output.choices import Choice, restored_digest
from gateway.output.event_ids import HEADER, StreamIdentity, check_positions, check_restored
from gateway.output.output_text import OutputText
from gateway.text.fair_threads import Steps
from gateway.text.reasoning_end import ThoughtMarkers
from gateway.text.stop_strings import ContentScan
from gateway.text.tokenizer import CHARS_PER_TOKEN
from http_kit.errors import MAX_PARAM_CHARS, shortened
from protocol.errors import DeadlineExceeded, InvalidRequest, ModelNotFound, PromptTooLong
from protocol.request_ids import choice_id
from protocol.retention import RetentionHint
from protocol.sampling import SamplingParams
from router.requests.interface import GenerationRequest
from router.requests.prompt_hashes import PromptHashes

MAX_REPORTED_VALUES = 1 << 20
"""The most log-probabilities in one answer: each takes some 70 bytes of JSON, and 300 of memory."""
MAX_REPEATED_VALUES = 1 << 17
"""The most log-probabilities in a stream that repeats them at its end."""
MAX_STARTED_TOKENS = 1 << 22
"""The most prompt tokens of all sequences of a request together: workers get each sequence's
prompt."""
MIN_TEXT_BYTES = 1 << 20
"""A text of at most this many bytes is encoded even if the context is short."""


class EncodedPrompt(msgspec.Struct, frozen=True):
    """A prompt as token ids, and as text in `echo` if the answer repeats it.

    - `kept_ids`: special tokens whose text the output shows even if special tokens are skipped.
    - `thoughts`: the markers of reasoning before the output's answer.
    - `contents`: makes the scan that separates content from calls in one output; None if the output
      cannot call.
    - `is_encoded`: the ids come from the tokenizer, not from the client.
    - `text`: the text that was encoded, if the answer may be remembered.
    """

    token_ids: list[int]
    echo: str = ""
    kept_ids: frozenset[int] = frozenset()
    thoughts: ThoughtMarkers | None = None
    contents: Callable[[], ContentScan | None] = lambda: None
    is_encoded: bool = False
    text: PromptText | None = None


def check_model(context: ApiContext, name: str) -> None:
    """Raises ModelNotFound unless `name` is a name of the model served here."""
    model = context.model
    if name != model.name and name not in model.other_names:
        shown = shortened(name, MAX_PARAM_CHARS)
        served = ", ".join(map(repr, model.names))
        raise ModelNotFound(
            f"the model {shown!r} does not exist; this server serves {served}", "model"
        )


def check_length(context: ApiContext, text: str, param: str) -> Steps[None]:
    """Raises PromptTooLong if the beginning of the prompt alone exceeds the context. A prompt that
    passes may still be too long."""
    most = context.model.max_context
    least = yield from context.tokenizer.least_tokens(text, most)
    if least:
        raise PromptTooLong(most, least, param=param, is_least=True)


def check_text_length(context: ApiContext, text: str, param: str) -> None:
    """Raises PromptTooLong for a text that is too long to be encoded at all, even if its tokens
    are only counted, or truncated afterwards."""
    check_num_bytes(context, len(text), param)
    if not text.isascii():
        check_num_bytes(context, len(text.encode()), param)


def check_num_bytes(context: ApiContext, num_bytes: int, param: str) -> None:
    """As `check_text_length`, for a text of at least `num_bytes` in UTF-8."""
    if num_bytes <= MIN_TEXT_BYTES:
        return
    most = max(MIN_TEXT_BYTES, context.model.max_context * CHARS_PER_TOKEN)
    if num_bytes > most:
        raise PromptTooLong(most, num_bytes, param=param, unit="bytes")


def check_started_tokens(prompts: list[EncodedPrompt], num_choices: int) -> None:
    """Raises InvalidRequest if all sequences together start with too many prompt tokens."""
    num_tokens = num_choices * sum([len(prompt.token_ids) for prompt in prompts])
    if num_tokens > MAX_STARTED_TOKENS:
        raise InvalidRequest(
            f"'n': {num_choices} sequences of each prompt have {num_tokens} prompt tokens "
            f"together; the limit is {MAX_STARTED_TOKENS}",
            "n",
        )


def check_prompt_report(
    fields: GenerationFields, wish: OutputWish, prompts: list[EncodedPrompt]
) -> None:
    """Raises InvalidRequest if an answer would report too much of its prompts."""
    echoed = [prompt for prompt in prompts if prompt.echo]
    if wish.prompt_logprobs is None and not fields.return_token_ids and not echoed:
        return
    per_token = 0 if wish.prompt_logprobs is None else wish.prompt_logprobs + 1
    num_tokens = num_values = 0
    for prompt in prompts:
        num_tokens += len(prompt.token_ids)
        repeated = bool(prompt.echo) + bool(fields.return_token_ids)
        num_values += len(prompt.token_ids) * (per_token + repeated) * wish.prompt_copies
    if num_values <= MAX_REPORTED_VALUES:
        return
    param = "n"
    if wish.prompt_logprobs is not None:
        param = "logprobs" if fields.prompt_logprobs is None else "prompt_logprobs"
    raise InvalidRequest(
        f"'{param}': the answer would report {num_values} values of {num_tokens} prompt tokens; "
        f"the limit is {MAX_REPORTED_VALUES} for 'prompt_logprobs' (or 'logprobs' with 'echo') "
        "+ 1, times prompt tokens, times 'n'",
        param,
    )


def check_output_report(fields: GenerationFields, wish: OutputWish, num_prompts: int) -> int | None:
    """The most tokens of each sequence whose log-probabilities a whole answer can hold; None if it
    is not limited. Raises InvalidRequest if more are requested."""
    if wish.logprobs is None or (fields.stream and not wish.repeats_output):
        return None
    limit = MAX_REPEATED_VALUES if wish.repeats_output else MAX_REPORTED_VALUES
    per_token, num_sequences = wish.logprobs + 1, num_prompts * wish.num_choices
    most = max(1, limit // (per_token * num_sequences))
    if wish.requested_tokens is not None and wish.requested_tokens > most:
        param = "top_logprobs" if wish.repeats_output else "logprobs"
        or_stream = "" if wish.repeats_output else ", or stream"
        raise InvalidRequest(
            f"'{param}': the answer would report {per_token} log-probabilities for each of "
            f"{wish.requested_tokens} tokens in {num_sequences} sequences; the limit is {limit} "
            f"together: lower the limit of the output, 'n' or the alternatives{or_stream}",
            param,
        )
    return most


class _Shared(msgspec.Struct, frozen=True):
    """The data that all choices of a prompt share."""

    prompt: EncodedPrompt
    prompt_index: int
    has_text: bool
    hashes: PromptHashes
    num_shared: int


class ChoicePlanner(msgspec.Struct, frozen=True):
    """Turns the prompts of one HTTP request into choices."""

    context: ApiContext
    identity: StreamIdentity
    fields: GenerationFields
    wish: OutputWish

    def plan(self, prompts: list[EncodedPrompt]) -> list[Choice]:
        """All choices, in the order of the answer. Raises RequestError if one cannot be served, and
        Overloaded if the router has no room for all of them."""
        check_vocabulary(self.fields, self.context.tokenizer.vocab_size)
        if self.fields.truncate_prompt_tokens is not None:
            prompts = [self._truncated(prompt) for prompt in prompts]
        check_started_tokens(prompts, self.wish.num_choices)
        self.identity.terms.count_sequences(len(prompts) * self.wish.num_choices)
        check_prompt_report(self.fields, self.wish, prompts)
        most = check_output_report(self.fields, self.wish, len(prompts))
        choices: list[Choice] = []
        for prompt_index, prompt in enumerate(prompts):
            first = self._sampling(prompt, f"{self.identity.request_id}/{prompt_index}", most)
            num_shared = self.context.shared_prefixes.num_shared(prompt.token_ids)
            shared = _Shared(
                prompt, prompt_index, self._has_text(prompt), PromptHashes(), num_shared
            )
            for number in range(self.wish.num_choices):
                seed = choice_seed(first.seed, number)
                index = len(choices)
                num_scored = self.wish.prompt_logprobs
                if num_scored is not None and not self._scores_prompt(index, number):
                    num_scored = None
                sampling = first
                if number or num_scored is not None:
                    sampling = replace(first, seed=seed, prompt_logprobs=num_scored)
                choices.append(self._choice(index, shared, sampling))
        if self.identity.positions:
            check_positions(self.identity, [each.request.sampling.max_tokens for each in choices])
        if self.identity.life:
            check_restored(self.identity, restored_digest(choices))
        return choices

    def _scores_prompt(self, index: int, number: int) -> bool:
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

    def _sampling(self, prompt: EncodedPrompt, name: str, most: int | None) -> SamplingParams:
        """The sampling of a prompt's first choice; `most` bounds an output without a limit."""
        param = self.wish.prompt_param
        if not prompt.token_ids:
            raise InvalidRequest(f"'{param}' must not be empty: it has no tokens", param)
        tokenizer = self.context.tokenizer
        if not (prompt.is_encoded and tokenizer.stays_in_vocabulary):
            check_token_ids(prompt.token_ids, tokenizer.vocab_size, param)
        max_tokens = output_limit(
            len(prompt.token_ids),
            self.wish.generated_tokens,
            min_given(self.wish.default_tokens, most),
            self.context.model.max_context,
            param,
        )
        sampling = build_sampling(
            self.fields, self.context.defaults, max_tokens, self.wish.logprobs, name
        )
        if self.wish.grammar is None and not self.wish.bad_words:
            return sampling
        return replace(sampling, grammar=self.wish.grammar, bad_words=self.wish.bad_words)

    def _has_text(self, prompt: EncodedPrompt) -> bool:
        return not self.context.tokenizer.special_ids.issuperset(prompt.token_ids)

    def _choice(self, index: int, shared: _Shared, sampling: SamplingParams) -> Choice:
        prompt, fields, identity = shared.prompt, self.fields, self.identity
        terms, wish, is_stream = identity.terms, self.wish, bool(self.fields.stream)
        tenant = terms.tenant
        detokenizer = self.context.tokenizer.detokenizer(
            fields.skip_special_tokens is not False, not shared.has_text, prompt.kept_ids
        )
        rules = stop_rules(fields, sampling, self.context.defaults)
        contents = prompt.contents() if rules.strings else None
        return Choice(
            index=index,
            prompt_index=shared.prompt_index,
            request=GenerationRequest(
                request_id=choice_id(identity.request_id, index),
                token_ids=prompt.token_ids,
                sampling=sampling,
                # in the API, lower is earlier
                priority=-tenant.priority_of(fields.priority),
                deadline_ms=self._deadline_ms(),
                cache_salt=tenant.salt_with(fields.cache_salt or ""),
                share=tenant.share,
                shared_tokens=shared.num_shared,
                session=terms.session_or(fields.session_name),
                ttft_target_ms=terms.ttft_ms,
                tpot_target_ms=terms.tpot_ms,
                stays_in_pool=not tenant.terms.tiers,
                retention=self._retention(),
                # prompt log-probabilities are not kept with the tokens
                is_resumable=is_stream and sampling.prompt_logprobs is None,
                life=identity.life,
                is_open_ended=wish.requested_tokens is None and wish.default_tokens is None,
                hashes=shared.hashes,
            ),
            output=OutputText(detokenizer, rules, prompt.thoughts, contents),
            echo=prompt.echo,
            is_echo_only=wish.is_echo_only,
            known=identity.position_of(index),
            prompt_text=prompt.text,
            by_token=is_stream and identity.numbers_events,
        )

    def _retention(self) -> RetentionHint | None:
        """The hint in the body; without it, the hint in the header; without both, the lifetime that
        a field of the client's API asks for."""
        given, lifetime_s = self.fields.cache_retention, self.fields.lifetime_s
        if given is not None:
            return given.hint
        usual = None if lifetime_s is None else RetentionHint(lifetime_s)
        return self.identity.terms.retention or usual

    def _deadline_ms(self) -> int:
        """The request's remaining time. Raises InvalidRequest if a stream has no time left,
        DeadlineExceeded if the client no longer waits."""
        remaining_s = self.context.limits.request_timeout_s
        ends_at = self.identity.terms.ends_at
        if ends_at is not None:
            left_s = ends_at - self.context.metrics.clock()
            if left_s <= 0:
                raise DeadlineExceeded(f"the time that '{TIMEOUT_HEADER}' allows is over")
            remaining_s = min(remaining_s, left_s)
        if self.identity.life:
            remaining_s -= max(0.0, time.time() - self.identity.created)
        if remaining_s <= 0:
            raise InvalidRequest(f"'{HEADER}': the time of this stream is over", HEADER)
        return max(1, round(remaining_s * 1000))
