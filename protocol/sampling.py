"""How tokens are chosen and when generation stops, as it travels from router to workers.

A choice is a function of (seed, index, logits) alone, so that any worker and any attempt
continues a text identically. Stop strings are not here: the router matches text, workers ids.
"""

from __future__ import annotations

import msgspec

MAX_LOGPROBS = 20
MAX_GRAMMAR_CHARS = 262_144
MAX_BAD_WORDS = 512
MAX_BAD_WORD_TOKENS = 512


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling of one sequence. The router has validated the ranges; `n` became n sequences.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0 and `repetition_penalty` 1 switch
    their filter off. `seed` is always set: the router draws one where the caller gave none.
    `logprobs` None returns none; 0 returns the chosen token's only, k > 0 also the k most likely.
    `stop_token_ids` end the sequence (end-of-text ids included unless the caller ignores them);
    they are masked until `min_tokens` tokens have been chosen.

    `grammar` constrains the output's text: llguidance's Lark (`start: %json {...}`), or its JSON
    form (`{"grammars": [...]}`). The end-of-text token may be chosen only where the grammar is
    complete, and the sequence stops where nothing can follow. Of `allowed_token_ids`, where there
    are any, all chosen tokens are; `bad_words` are sequences of tokens that the output may not
    contain: the last one is masked where it would complete one.
    """

    max_tokens: int
    seed: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    grammar: str | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def penalizes(self) -> bool:
        """Whether the choice depends on the tokens so far, and not on the logits alone."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one output position: the chosen token's, and the most likely ones."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
