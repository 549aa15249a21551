"""Turns a router's message into a sequence, after checking the request.

Routers check more thoroughly, but workers never trust remote input: this module rejects every
request that could make the engine fail.
"""

from __future__ import annotations

import re

from engine.engine import EngineLimits
from engine.sampling.grammar import Grammars
from protocol.errors import InvalidRequest
from protocol.hashing import chain_start, more_hashes
from protocol.layout import KvLayout
from protocol.messages import Generate, NewAttempt, Prefill
from protocol.request_ids import request_of
from protocol.sampling import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_GRAMMAR_CHARS,
    MAX_LOGPROBS,
    MIN_REPETITION_PENALTY,
    SamplingParams,
)
from scheduling.sequence import Sequence

_TRACE_ID = re.compile("[0-9a-f]{32}")


class Intake:
    """Makes sequences for one engine. `max_deadline_s` caps the deadlines that routers set."""

    def __init__(
        self,
        limits: EngineLimits,
        layout: KvLayout,
        grammars: Grammars,
        hash_seed: str,
        max_deadline_s: float,
    ) -> None:
        self._limits = limits
        self._grammars = grammars
        self._layout = layout
        self._hash_seed = hash_seed
        self._max_deadline_s = max_deadline_s

    def sequence(self, message: NewAttempt, now: float) -> Sequence:
        """The sequence for `message`. Raises InvalidRequest, naming the field."""
        self._check(message)
        _check_sampling(message.sampling, self._limits.vocab_size)
        num_prompt = len(message.token_ids) - message.num_output
        grammar = None
        if message.sampling.grammar is not None:
            output = message.token_ids[num_prompt:]
            request = request_of(message.request_id)
            grammar = self._grammars.matcher(message.sampling.grammar, output, request)
        size = self._layout.block_size
        start = chain_start(
            self._layout.model_fingerprint,
            message.cache_salt,
            self._hash_seed,
            message.shared_tokens,
            size,
        )
        shared = more_hashes([], start, message.token_ids[: start.num_shared * size], size)
        return Sequence(
            request_id=message.request_id,
            attempt=message.attempt,
            tokens=list(message.token_ids),
            num_prompt=num_prompt,
            sampling=message.sampling,
            root_hash=start.parent(shared),
            hashes=shared,
            num_shared=start.num_shared,
            block_size=size,
            arrival=now,
            deadline=now + min(message.deadline_ms / 1e3, self._max_deadline_s),
            priority=message.priority,
            share=message.share,
            session=message.session,
            remote=isinstance(message, Generate) and message.prefill is not None,
            prefill_only=isinstance(message, Prefill),
            target=message.target if isinstance(message, Prefill) else "",
            grammar=grammar,
            trace_id=message.trace_id,
            stays_in_pool=message.stays_in_pool,
            retention=message.retention if isinstance(message, Generate) else None,
        )

    def _check(self, message: NewAttempt) -> None:
        tokens, vocab_size = message.token_ids, self._limits.vocab_size
        num_prompt = len(tokens) - message.num_output
        if message.num_output < 0 or num_prompt < 1:
            raise InvalidRequest(
                f"{message.num_output} of {len(tokens)} tokens cannot be output", "num_output"
            )
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            raise InvalidRequest(
                f"token ids must lie in [0, {vocab_size}), got {min(tokens)} to {max(tokens)}",
                "token_ids",
            )
        longest = len(tokens)  # a prefill worker computes these only
        if isinstance(message, Generate):
            longest = num_prompt + message.sampling.max_tokens
        if longest > self._limits.max_context:
            raise InvalidRequest(
                f"prompt and output of {longest} tokens exceed the context of "
                f"{self._limits.max_context}",
                "max_tokens",
            )
        if message.num_output >= message.sampling.max_tokens:
            raise InvalidRequest("nothing is left to generate", "max_tokens")
        if not 0 <= message.shared_tokens <= num_prompt:
            raise InvalidRequest(
                f"{message.shared_tokens} of the prompt's {num_prompt} tokens cannot be shared",
                "shared_tokens",
            )
        if message.attempt < 0:
            raise InvalidRequest(f"attempt {message.attempt} is negative", "attempt")
        if message.trace_id and not _TRACE_ID.fullmatch(message.trace_id):
            raise InvalidRequest("a trace id has 32 hexadecimal digits", "trace_id")


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Check the ranges outside of which the sampler's arithmetic has no meaning. Raises
    InvalidRequest."""
    limits = {
        "temperature": (0.0, 100.0),
        "top_k": (0, 2**31),
        "top_p": (0.0, 1.0),
        "min_p": (0.0, 1.0),
        "repetition_penalty": (MIN_REPETITION_PENALTY, 1e3),
        "presence_penalty": (-100.0, 100.0),
        "frequency_penalty": (-100.0, 100.0),
        "seed": (-(2**63), 2**64 - 1),
        "min_tokens": (0, sampling.max_tokens),
    }
    for name, (low, high) in limits.items():
        value = getattr(sampling, name)
        if not low <= value <= high:
            raise InvalidRequest(f"{name} must lie in [{low}, {high}], got {value}", name)
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(sampling, name)
        if value is not None and not 0 <= value <= MAX_LOGPROBS:
            raise InvalidRequest(f"{name} must lie in [0, {MAX_LOGPROBS}]", name)
    if sampling.grammar is not None and len(sampling.grammar) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(f"a grammar has {MAX_GRAMMAR_CHARS} characters at most", "grammar")
    allowed = sampling.allowed_token_ids
    if allowed is not None and not _are_tokens(allowed, vocab_size):
        raise InvalidRequest("allowed_token_ids must be tokens, one at least", "allowed_token_ids")
    if len(sampling.bad_words) > MAX_BAD_WORDS or not all(
        len(word) <= MAX_BAD_WORD_TOKENS and _are_tokens(word, vocab_size)
        for word in sampling.bad_words
    ):
        raise InvalidRequest("bad_words are too many, too long, or no tokens", "bad_words")
    for token_id, bias in (sampling.logit_bias or {}).items():
        if not 0 <= token_id < vocab_size or not -1e4 <= bias <= 1e4:
            raise InvalidRequest(f"logit_bias {token_id}: {bias} is out of range", "logit_bias")


def _are_tokens(token_ids: tuple[int, ...], vocab_size: int) -> bool:
    return bool(token_ids) and min(token_ids) >= 0 and max(token_ids) < vocab_size
