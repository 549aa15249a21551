"""How tokens are chosen and when generation stops: parameters that the router sends to workers.

A choice is a function of (seed, index, logits) alone, so that any worker and any attempt continues
a text identically. Workers match token ids only; the router matches stop strings.
"""

from __future__ import annotations

from struct import unpack_from
from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.field_bounds import Count, Logprob, Number, Packed, TokenId

GREEDY_BELOW = 1e-5
"""Temperatures below this count as greedy: in fp32 they have the same effect."""

MIN_REPETITION_PENALTY = 1e-3
MAX_LOGPROBS = 20
MAX_GRAMMAR_CHARS = 262_144
MAX_BAD_WORDS = 512
MAX_BAD_WORD_TOKENS = 512
SomeIds = Annotated[tuple[TokenId, ...], Meta(max_length=65_536)]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling of one sequence. The router has validated the ranges; `n` became n sequences.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0 and `repetition_penalty` 1 switch
    their filter off. `seed` is always set: the router draws one if the caller gave none.
    `logprobs` None returns none; 0 returns the chosen token's only, k > 0 also the k most likely.
    `prompt_logprobs` requests the same for the prompt's tokens, sent with the first output token.
    `stop_token_ids` end the sequence (end-of-text ids included unless the caller ignores them);
    they are masked until `min_tokens` tokens have been chosen.

    `grammar` constrains the output's text: llguidance's Lark (`start: %json {...}`), or its JSON
    form (`{"grammars": [...]}`). The end-of-text token may be chosen only where the grammar is
    complete, and the sequence stops where no token can follow. If `allowed_token_ids` is set, only
    these tokens are chosen. `bad_words` are token sequences that the output may not contain: a
    token that would complete one is masked.
    """

    max_tokens: Count
    seed: int
    min_tokens: Count = 0
    temperature: Number = 1.0
    top_k: Count = 0
    top_p: Number = 1.0
    min_p: Number = 0.0
    repetition_penalty: Number = 1.0
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    logit_bias: Annotated[dict[TokenId, Number], Meta(max_length=65_536)] | None = None
    logprobs: Count | None = None
    prompt_logprobs: Count | None = None
    stop_token_ids: SomeIds = ()
    grammar: Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARS)] | None = None
    allowed_token_ids: SomeIds | None = None
    bad_words: Annotated[tuple[SomeIds, ...], Meta(max_length=MAX_BAD_WORDS)] = ()

    @property
    def penalizes(self) -> bool:
        """Whether the choice depends on the tokens so far, not only on the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def is_plain(self) -> bool:
        """Whether sampling is greedy, returns no log-probabilities of the output, and changes
        logits only by `grammar` and `min_tokens`."""
        return (
            self.temperature < GREEDY_BELOW
            and self.logprobs is None
            and not self.penalizes
            and not self.logit_bias
            and self.allowed_token_ids is None
            and not self.bad_words
        )


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at one output position: the chosen token's, and the most likely ones."""

    logprob: Logprob
    top: Annotated[tuple[tuple[TokenId, Logprob], ...], Meta(max_length=MAX_LOGPROBS)] = ()


class PromptLogprob(msgspec.Struct, frozen=True, gc=False):
    """One token of a prompt: `rank` is 1 if no other token was more likely there; `top` are the
    most likely tokens, best first."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of all N tokens of a prompt except the first, which has no context.

    Packed, little-endian, because prompts are long: `logprobs` [N - 1] and `top_logprobs`
    [N - 1, num_top] are fp32, `ranks` [N - 1] and `top_ids` [N - 1, num_top] int32.
    """

    num_top: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
    logprobs: Packed
    ranks: Packed
    top_ids: Packed
    top_logprobs: Packed

    def fits(self, num_prompt: int) -> bool:
        """Whether all lengths are right for a prompt of `num_prompt` tokens."""
        narrow, wide = 4 * (num_prompt - 1), 4 * (num_prompt - 1) * self.num_top
        lengths = (len(self.logprobs), len(self.ranks), len(self.top_ids), len(self.top_logprobs))
        return self.num_top >= 0 and lengths == (narrow, narrow, wide, wide)

    @property
    def num_bytes(self) -> int:
        """Bytes of all lists."""
        return 2 * len(self.logprobs) + 2 * len(self.top_ids)

    @property
    def num_entries(self) -> int:
        """Number of tokens that have an entry."""
        return len(self.logprobs) // 4

    def entries(self, start: int = 0, stop: int | None = None) -> list[PromptLogprob]:
        """One entry for each token except the first, in order; `start` and `stop` select some."""
        start, stop, _ = slice(start, stop).indices(self.num_entries)
        count, width = max(0, stop - start), self.num_top
        ids = unpack_from(f"<{count * width}i", self.top_ids, 4 * start * width)
        values = unpack_from(f"<{count * width}f", self.top_logprobs, 4 * start * width)
        alternatives = tuple(zip(ids, values, strict=True))
        return [
            PromptLogprob(logprob, rank, alternatives[place * width : (place + 1) * width])
            for place, (logprob, rank) in enumerate(
                zip(
                    unpack_from(f"<{count}f", self.logprobs, 4 * start),
                    unpack_from(f"<{count}i", self.ranks, 4 * start),
                    strict=True,
                )
            )
        ]
