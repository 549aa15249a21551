"""Log-probabilities in the two formats of OpenAI's API, and in vLLM's format for prompts.

A token that is not valid UTF-8 by itself is written `bytes:\\xe2\\x80`, as in OpenAI's API. If the
client asks for ids instead of text, every token is written `token_id:7`, as in vLLM.
JSON has no infinity, so tokens that a filter excluded are reported as -9999.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from protocol.sampling import PromptLogprobs
from router.api.openai.answers import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptTokenLogprob,
    PromptTokenLogprobs,
    TopLogprob,
)
from router.requests.output_text import OutputToken
from router.text.tokenizer import Tokenizer

LOWEST = -9999.0


@dataclass(frozen=True, slots=True)
class TokenNames:
    """How tokens are written: as their text, or `by_id`."""

    tokenizer: Tokenizer
    by_id: bool = False

    def of(self, token_id: int) -> str:
        """The name of one token."""
        if self.by_id:
            return f"token_id:{token_id}"
        return _token_text(self.tokenizer.token_bytes(token_id))


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt as token ids, and its text as repeated in the answer."""

    token_ids: list[int]
    text: str
    skips_special: bool


def completion_logprobs(
    tokens: list[OutputToken], names: TokenNames, echoed_chars: int = 0
) -> CompletionLogprobs:
    """Lists by position; the alternatives always include the chosen token.

    `echoed_chars` is the number of prompt characters before the output.
    """
    return CompletionLogprobs(
        tokens=[names.of(token.token_id) for token in tokens],
        token_logprobs=[max(LOWEST, token.logprobs.logprob) for token in tokens],
        top_logprobs=[_alternatives(token, names) for token in tokens],
        text_offset=[echoed_chars + token.start for token in tokens],
    )


def echoed_logprobs(
    prompt: EchoedPrompt, told: PromptLogprobs, count: int, names: TokenNames
) -> CompletionLogprobs:
    """The same for an echoed prompt, with `count` alternatives; its first token has no values."""
    listed = CompletionLogprobs([], [], [], _offsets(prompt, names.tokenizer))
    listed.tokens.extend(names.of(each) for each in prompt.token_ids)
    listed.token_logprobs.append(None)
    listed.top_logprobs.append(None)
    for token_id, entry in zip(prompt.token_ids[1:], told.entries(), strict=True):
        pairs = (*entry.top[:count], (token_id, entry.logprob))
        listed.token_logprobs.append(max(LOWEST, entry.logprob))
        listed.top_logprobs.append(_by_name(pairs, names))
    return listed


def joined_logprobs(first: CompletionLogprobs, then: CompletionLogprobs) -> CompletionLogprobs:
    """Concatenates the lists of a text and of its continuation."""
    return CompletionLogprobs(
        first.tokens + then.tokens,
        first.token_logprobs + then.token_logprobs,
        first.top_logprobs + then.top_logprobs,
        first.text_offset + then.text_offset,
    )


def prompt_logprobs(
    token_ids: list[int], told: PromptLogprobs, count: int, tokenizer: Tokenizer
) -> PromptTokenLogprobs:
    """vLLM's format: the prompt's own token, then the `count` most likely ones at its position."""
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


def chat_logprobs(tokens: list[OutputToken], names: TokenNames) -> ChatLogprobs:
    """One entry per token, each with the requested number of alternatives."""
    entries: list[ChatTokenLogprob] = []
    for token in tokens:
        chosen = _top_logprob(token.token_id, token.logprobs.logprob, names)
        top = [_top_logprob(each, value, names) for each, value in token.logprobs.top]
        entries.append(ChatTokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top))
    return ChatLogprobs(entries)


def _alternatives(token: OutputToken, names: TokenNames) -> dict[str, float]:
    pairs = (*token.logprobs.top, (token.token_id, token.logprobs.logprob))
    return _by_name(pairs, names)


def _by_name(pairs: Iterable[tuple[int, float]], names: TokenNames) -> dict[str, float]:
    return {names.of(each): max(LOWEST, value) for each, value in pairs}


def _top_logprob(token_id: int, logprob: float, names: TokenNames) -> TopLogprob:
    data = names.tokenizer.token_bytes(token_id)
    return TopLogprob(names.of(token_id), max(LOWEST, logprob), list(data))


def _token_text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _offsets(prompt: EchoedPrompt, tokenizer: Tokenizer) -> list[int]:
    """Where each token's text begins, in characters. Special tokens in the text count, too."""
    special = tokenizer.special_ids.intersection(prompt.token_ids)
    shown = frozenset(each for each in special if tokenizer.token_name(each) in prompt.text)
    detokenizer = tokenizer.detokenizer(prompt.skips_special, at_start=True, kept_ids=shown)
    offsets, end = [], 0
    for token_id in prompt.token_ids:
        offsets.append(min(end, len(prompt.text)))
        end += len(detokenizer.push(token_id))
    return offsets
