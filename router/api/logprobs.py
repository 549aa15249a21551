"""Log-probabilities of reported tokens in the two shapes of OpenAI's API, and in vLLM's of prompts.

A token that is not whole characters by itself is written `bytes:\\xe2\\x80`, as OpenAI does.
JSON has no infinity: what a filter made impossible is reported as -9999.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from protocol.sampling import PromptLogprobs
from router.api.responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptTokenLogprob,
    PromptTokenLogprobs,
    TopLogprob,
)
from router.output import OutputToken
from router.tokenizer import Tokenizer

LOWEST = -9999.0


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt as token ids and as the text that the answer repeats."""

    token_ids: list[int]
    text: str
    skips_special: bool


def completion_logprobs(
    tokens: list[OutputToken], tokenizer: Tokenizer, echoed_chars: int = 0
) -> CompletionLogprobs:
    """Lists by position; the alternatives always include the chosen token.

    `echoed_chars` of the prompt stand before the output.
    """
    return CompletionLogprobs(
        tokens=[_token_text(tokenizer.token_bytes(token.token_id)) for token in tokens],
        token_logprobs=[max(LOWEST, token.logprobs.logprob) for token in tokens],
        top_logprobs=[_alternatives(token, tokenizer) for token in tokens],
        text_offset=[echoed_chars + token.start for token in tokens],
    )


def echoed_logprobs(
    prompt: EchoedPrompt, told: PromptLogprobs, count: int, tokenizer: Tokenizer
) -> CompletionLogprobs:
    """The same of the prompt itself, with `count` alternatives; its first token has none."""
    listed = CompletionLogprobs([], [], [], _offsets(prompt, tokenizer))
    listed.tokens.extend(_token_text(tokenizer.token_bytes(each)) for each in prompt.token_ids)
    listed.token_logprobs.append(None)
    listed.top_logprobs.append(None)
    for token_id, entry in zip(prompt.token_ids[1:], told.entries(), strict=True):
        pairs = (*entry.top[:count], (token_id, entry.logprob))
        listed.token_logprobs.append(max(LOWEST, entry.logprob))
        listed.top_logprobs.append(_by_text(pairs, tokenizer))
    return listed


def joined_logprobs(first: CompletionLogprobs, then: CompletionLogprobs) -> CompletionLogprobs:
    """Those of a text, and of what follows it."""
    return CompletionLogprobs(
        first.tokens + then.tokens,
        first.token_logprobs + then.token_logprobs,
        first.top_logprobs + then.top_logprobs,
        first.text_offset + then.text_offset,
    )


def prompt_logprobs(
    token_ids: list[int], told: PromptLogprobs, count: int, tokenizer: Tokenizer
) -> PromptTokenLogprobs:
    """vLLM's shape: each token of the prompt first, then the `count` most likely at its place."""
    listed: PromptTokenLogprobs = [None]
    for token_id, entry in zip(token_ids[1:], told.entries(), strict=True):
        ranked = [(token_id, entry.logprob, entry.rank)]
        ranked += [(each, value, rank) for rank, (each, value) in enumerate(entry.top[:count], 1)]
        place: dict[str, PromptTokenLogprob] = {}
        for each, value, rank in ranked:
            text = _token_text(tokenizer.token_bytes(each))
            place.setdefault(str(each), PromptTokenLogprob(max(LOWEST, value), rank, text))
        listed.append(place)
    return listed


def chat_logprobs(tokens: list[OutputToken], tokenizer: Tokenizer) -> ChatLogprobs:
    """One entry a token, each with as many alternatives as were asked for."""
    entries: list[ChatTokenLogprob] = []
    for token in tokens:
        chosen = _top_logprob(token.token_id, token.logprobs.logprob, tokenizer)
        top = [_top_logprob(each, value, tokenizer) for each, value in token.logprobs.top]
        entries.append(ChatTokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top))
    return ChatLogprobs(entries)


def _alternatives(token: OutputToken, tokenizer: Tokenizer) -> dict[str, float]:
    pairs = (*token.logprobs.top, (token.token_id, token.logprobs.logprob))
    return _by_text(pairs, tokenizer)


def _by_text(pairs: Iterable[tuple[int, float]], tokenizer: Tokenizer) -> dict[str, float]:
    return {_token_text(tokenizer.token_bytes(each)): max(LOWEST, value) for each, value in pairs}


def _top_logprob(token_id: int, logprob: float, tokenizer: Tokenizer) -> TopLogprob:
    data = tokenizer.token_bytes(token_id)
    return TopLogprob(_token_text(data), max(LOWEST, logprob), list(data))


def _token_text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _offsets(prompt: EchoedPrompt, tokenizer: Tokenizer) -> list[int]:
    """Where the text of each token begins. Special tokens that stand in the text have one."""
    special = tokenizer.special_ids.intersection(prompt.token_ids)
    shown = frozenset(each for each in special if tokenizer.token_name(each) in prompt.text)
    detokenizer = tokenizer.detokenizer(prompt.skips_special, at_start=True, kept_ids=shown)
    offsets, end = [], 0
    for token_id in prompt.token_ids:
        offsets.append(min(end, len(prompt.text)))
        end += len(detokenizer.push(token_id))
    return offsets
