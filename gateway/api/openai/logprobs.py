"""Log-probabilities in the two formats of OpenAI's API, and in vLLM's format for prompts.

A token that is not valid UTF-8 by itself is written `bytes:\\xe2\\x80`, as in OpenAI's API. If the
client asks for ids instead of text, every token is written `token_id:7`, as in vLLM.
JSON has no infinity, so tokens that a filter excluded are reported as -9999.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from gateway.api.openai.answers import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptTokenLogprob,
    PromptTokenLogprobs,
    TopLogprob,
)
from gateway.api.replies.answer_format import LOWEST
from gateway.api.replies.json_pieces import Holes, list_pieces, slices
from gateway.output.output_text import OutputToken
from gateway.text.tokenizer import Tokenizer
from protocol.sampling import PromptLogprob, PromptLogprobs


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
        tokens=_names(tokens, names),
        token_logprobs=_values(tokens),
        top_logprobs=[_alternatives(token, names) for token in tokens],
        text_offset=_starts(tokens, echoed_chars),
    )


def long_completion_logprobs(
    tokens: list[OutputToken],
    names: TokenNames,
    holes: Holes,
    echoed_chars: int,
    echoed: EchoedLogprobs | None,
) -> CompletionLogprobs:
    """Like `completion_logprobs`, for the tokens of a whole answer, after those of an echoed
    prompt; the lists are holes."""
    width = 1 + max((len(token.logprobs.top) for token in tokens[:1]), default=0)

    def column(
        of_echo: Callable[[EchoedLogprobs], Iterator[list[Any]]],
        of_output: Callable[[Sequence[OutputToken]], list[Any]],
    ) -> Any:
        before = iter(()) if echoed is None else of_echo(echoed)
        after = (of_output(part) for part in slices(tokens, width))
        return holes.put(list_pieces(chain(before, after)))

    return CompletionLogprobs(
        tokens=column(lambda echo: echo.names(), lambda part: _names(part, names)),
        token_logprobs=column(lambda echo: echo.values(), _values),
        top_logprobs=column(
            lambda echo: echo.alternatives(),
            lambda part: [_alternatives(token, names) for token in part],
        ),
        text_offset=column(lambda echo: echo.offsets(), lambda part: _starts(part, echoed_chars)),
    )


@dataclass(frozen=True, slots=True)
class EchoedLogprobs:
    """The lists of an echoed prompt, in slices, with `count` alternatives; the prompt's first
    token has no values."""

    prompt: EchoedPrompt
    logprobs: PromptLogprobs
    count: int
    token_names: TokenNames

    def names(self) -> Iterator[list[str]]:
        """The tokens."""
        for part in slices(self.prompt.token_ids, 1):
            yield [self.token_names.of(each) for each in part]

    def values(self) -> Iterator[list[float | None]]:
        """The tokens' log-probabilities; None for the first token."""
        yield [None]
        for _, entries in self._entries(1):
            yield [max(LOWEST, entry.logprob) for entry in entries]

    def alternatives(self) -> Iterator[list[dict[str, float] | None]]:
        """For each position, the most likely tokens and the prompt's own token."""
        yield [None]
        for ids, entries in self._entries(1 + self.count):
            yield [
                _by_name((*entry.top[: self.count], (token_id, entry.logprob)), self.token_names)
                for token_id, entry in zip(ids, entries, strict=True)
            ]

    def offsets(self) -> Iterator[list[int]]:
        """The offsets of the tokens' texts, in characters."""
        yield _offsets(self.prompt, self.token_names.tokenizer)

    def _entries(self, width: int) -> Iterator[tuple[list[int], list[PromptLogprob]]]:
        return _prompt_entries(self.prompt.token_ids, self.logprobs, width)


def prompt_logprobs(
    token_ids: list[int], logprobs: PromptLogprobs, count: int, tokenizer: Tokenizer
) -> Iterator[bytes]:
    """JSON of `PromptTokenLogprobs`, vLLM's format, in pieces: the prompt's own token, then the
    `count` most likely ones at its position."""

    def parts() -> Iterator[PromptTokenLogprobs]:
        yield [None]
        for ids, entries in _prompt_entries(token_ids, logprobs, 1 + count):
            yield [
                _place(token_id, entry, count, tokenizer)
                for token_id, entry in zip(ids, entries, strict=True)
            ]

    return list_pieces(parts())


def _place(
    token_id: int, entry: PromptLogprob, count: int, tokenizer: Tokenizer
) -> dict[str, PromptTokenLogprob]:
    ranked = [(token_id, entry.logprob, entry.rank)]
    ranked += [(each, value, rank) for rank, (each, value) in enumerate(entry.top[:count], 1)]
    place: dict[str, PromptTokenLogprob] = {}
    for each, value, rank in ranked:
        text = _token_text(tokenizer.token_bytes(each))
        place.setdefault(str(each), PromptTokenLogprob(max(LOWEST, value), rank, text))
    return place


def _prompt_entries(
    token_ids: list[int], logprobs: PromptLogprobs, width: int
) -> Iterator[tuple[list[int], list[PromptLogprob]]]:
    """Slices of the prompt's tokens, except the first one, with their entries."""
    if logprobs.num_entries != len(token_ids) - 1:
        raise ValueError(f"{logprobs.num_entries} entries for {len(token_ids)} tokens")
    for part in slices(range(logprobs.num_entries), width):
        start, stop = part[0], part[-1] + 1
        yield token_ids[start + 1 : stop + 1], logprobs.entries(start, stop)


def chat_logprobs(tokens: Sequence[OutputToken], names: TokenNames) -> ChatLogprobs:
    """One entry per token, each with the requested number of alternatives."""
    return ChatLogprobs(_chat_entries(tokens, names))


def long_chat_logprobs(tokens: list[OutputToken], names: TokenNames, holes: Holes) -> ChatLogprobs:
    """Like `chat_logprobs`, for the tokens of a whole answer. The list of entries is a hole in the
    JSON, filled in pieces."""
    width = 1 + max((len(token.logprobs.top) for token in tokens[:1]), default=0)
    parts = (_chat_entries(part, names) for part in slices(tokens, width))
    return ChatLogprobs(holes.put(list_pieces(parts)))


def _chat_entries(tokens: Sequence[OutputToken], names: TokenNames) -> list[ChatTokenLogprob]:
    entries: list[ChatTokenLogprob] = []
    for token in tokens:
        chosen = _top_logprob(token.token_id, token.logprobs.logprob, names)
        top = tuple([_top_logprob(each, value, names) for each, value in token.logprobs.top])
        entries.append(ChatTokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top))
    return entries


def _names(tokens: Sequence[OutputToken], names: TokenNames) -> list[str]:
    return [names.of(token.token_id) for token in tokens]


def _values(tokens: Sequence[OutputToken]) -> list[float | None]:
    return [max(LOWEST, token.logprobs.logprob) for token in tokens]


def _starts(tokens: Sequence[OutputToken], echoed_chars: int) -> list[int]:
    return [echoed_chars + token.start for token in tokens]


def _alternatives(token: OutputToken, names: TokenNames) -> dict[str, float]:
    pairs = (*token.logprobs.top, (token.token_id, token.logprobs.logprob))
    return _by_name(pairs, names)


def _by_name(pairs: Iterable[tuple[int, float]], names: TokenNames) -> dict[str, float]:
    return {names.of(each): max(LOWEST, value) for each, value in pairs}


def _top_logprob(token_id: int, logprob: float, names: TokenNames) -> TopLogprob:
    data = names.tokenizer.token_bytes(token_id)
    return TopLogprob(names.of(token_id), max(LOWEST, logprob), tuple(data))


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
