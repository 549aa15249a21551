"""Converts a request's fields to the sampling parameters of one sequence, its seed, its stop rules.

A field that the caller leaves out takes the checkpoint's default (`checkpoint_defaults`). This
module makes all the checks that need the vocabulary. How long the output may be is decided in
`output_limit`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from gateway.api.checkpoint_defaults import SamplingDefaults
from gateway.api.generation_fields import GenerationFields
from gateway.output.output_text import StopRules
from http_kit.errors import MAX_PARAM_CHARS, shortened
from protocol.errors import InvalidRequest
from protocol.sampling import SamplingParams

_SEED_BITS = 63


def build_sampling(
    fields: GenerationFields,
    defaults: SamplingDefaults,
    max_tokens: int,
    logprobs: int | None,
    name: str,
) -> SamplingParams:
    """The sampling of choice 0; `choice_seed` varies the seed. Check the ids in `fields` first.

    Without a seed in `fields`, `name` determines it, so that any router continues the same text.
    """
    stop_ids = set(fields.stop_token_ids or ())
    if not fields.ignore_eos:
        stop_ids.update(defaults.end_token_ids)
    min_tokens = fields.least_tokens
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"'min_tokens' ({min_tokens}) exceeds the limit of {max_tokens} output tokens",
            "min_tokens",
        )
    bias, is_greedy = fields.logit_bias, fields.top_p == 0
    temperature = defaults.temperature if fields.temperature is None else fields.temperature
    top_p = defaults.top_p if fields.top_p is None else fields.top_p
    return SamplingParams(
        max_tokens=max_tokens,
        seed=_seed_of(name) if fields.seed is None else _fold(fields.seed),
        min_tokens=min_tokens,
        temperature=0.0 if is_greedy else temperature,
        top_k=max(0, defaults.top_k if fields.top_k is None else fields.top_k),
        top_p=1.0 if is_greedy else top_p,
        min_p=defaults.min_p if fields.min_p is None else fields.min_p,
        repetition_penalty=defaults.repetition_penalty
        if fields.repetition_penalty is None
        else fields.repetition_penalty,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias={int(key): value for key, value in bias.items()} if bias else None,
        logprobs=logprobs,
        stop_token_ids=tuple(sorted(stop_ids)),
        allowed_token_ids=_sorted_ids(fields.allowed_token_ids),
    )


def stop_rules(
    fields: GenerationFields, sampling: SamplingParams, defaults: SamplingDefaults
) -> StopRules:
    """The router's stop rules for a sequence with this sampling. The model's own end-of-text
    tokens do not count as named by the client."""
    ends = () if fields.ignore_eos else defaults.end_token_ids
    return StopRules(
        strings=fields.stop_strings,
        token_ids=frozenset(sampling.stop_token_ids),
        named=frozenset(fields.stop_token_ids or ()).difference(ends),
        min_tokens=sampling.min_tokens,
        include_in_output=bool(fields.include_stop_str_in_output),
    )


def check_vocabulary(fields: GenerationFields, vocab_size: int) -> None:
    """Raises InvalidRequest if any field but the prompt has an id outside the vocabulary."""
    if fields.stop_token_ids:
        check_token_ids(fields.stop_token_ids, vocab_size, "stop_token_ids")
    if fields.allowed_token_ids:
        check_token_ids(fields.allowed_token_ids, vocab_size, "allowed_token_ids")
    for key in fields.logit_bias or {}:
        if not (key.isascii() and key.isdecimal() and len(key) < 20):
            shown = shortened(key, MAX_PARAM_CHARS)
            raise InvalidRequest(f"'logit_bias': {shown!r} is not a token id", "logit_bias")
        check_token_ids([int(key)], vocab_size, "logit_bias")


def check_token_ids(token_ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Raises InvalidRequest if an id lies outside the vocabulary."""
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise InvalidRequest(
            f"'{param}': token id {largest} is outside the vocabulary of {vocab_size} tokens", param
        )


def choice_seed(seed: int, choice: int) -> int:
    """Seed of the n-th choice: the first uses the request's seed, the others unrelated seeds."""
    if choice == 0:
        return seed
    return _seed_of(f"{seed}/{choice}")


def _seed_of(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return _fold(int.from_bytes(digest, "big"))


def _fold(seed: int) -> int:
    return seed & ((1 << _SEED_BITS) - 1)


def _sorted_ids(token_ids: list[int] | None) -> tuple[int, ...] | None:
    return None if token_ids is None else tuple(sorted(set(token_ids)))
