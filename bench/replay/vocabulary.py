"""Words that the served model's tokenizer makes one token of, whatever stands beside them."""

from __future__ import annotations

import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

import msgspec

from protocol.errors import BatonError

_LEAST = 16
_TIMEOUT_S = 60.0
_SAMPLE = 64
WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "it",
    "for",
    "on",
    "with",
    "as",
    "at",
    "by",
    "this",
    "be",
    "from",
    "or",
    "that",
    "are",
    "not",
    "an",
    "have",
    "was",
    "you",
    "all",
    "can",
    "has",
    "but",
    "one",
    "new",
    "they",
    "which",
    "will",
    "if",
    "there",
    "when",
    "more",
    "no",
    "other",
    "so",
    "time",
    "what",
    "up",
    "use",
    "your",
    "how",
    "some",
    "them",
    "then",
    "only",
    "may",
    "also",
    "any",
    "like",
    "these",
    "first",
    "two",
    "its",
    "than",
    "into",
    "out",
    "just",
    "over",
    "most",
    "name",
    "work",
    "way",
    "where",
    "after",
    "back",
    "through",
    "each",
    "same",
    "list",
    "set",
    "string",
    "value",
    "object",
    "file",
    "module",
    "class",
    "function",
    "return",
    "number",
    "line",
    "data",
    "test",
    "type",
    "text",
    "open",
    "read",
    "write",
    "call",
    "help",
    "main",
    "order",
    "state",
]


@dataclass(frozen=True)
class Target:
    """The system under test: its URL without `/v1`, the model's name there, and the API key."""

    url: str
    model: str
    key: str | None = None

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON of an answer; POST if there is a body. Raises BatonError."""
        headers = {"content-type": "application/json"}
        if self.key is not None:
            headers["authorization"] = f"Bearer {self.key}"
        data = None if body is None else msgspec.json.encode(body)
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                return msgspec.json.decode(answer.read())
        except (OSError, ValueError) as error:
            detail = str(error)
            if isinstance(error, urllib.error.HTTPError):
                detail = error.read()[:300].decode(errors="replace")
            raise BatonError(f"{self.url}{path}: {detail}") from error


@dataclass(frozen=True)
class Vocabulary:
    """Words, each with its token. A text of `n` words has `n + overhead` tokens."""

    words: tuple[str, ...]
    ids: tuple[int, ...]
    overhead: int


def learn_vocabulary(target: Target) -> Vocabulary:
    """Find usable words by the system's `/tokenize`. Raises BatonError."""
    found: dict[str, int] = {}
    for word in WORDS:
        ids = _tokens(target, f" {word}", add_special_tokens=False)
        if len(ids) == 1:
            found.setdefault(word, ids[0])
    if len(found) < _LEAST:
        raise BatonError(f"only {len(found)} of {len(WORDS)} words are one token for this model")
    words = tuple(found)
    sample = [words[index * 7 % len(words)] for index in range(_SAMPLE)]
    overhead = len(_tokens(target, text_of(sample))) - _SAMPLE
    if overhead < 0:
        raise BatonError("words beside each other become other tokens: use --prompts ids")
    return Vocabulary(words, tuple(found.values()), overhead)


def text_of(words: list[str]) -> str:
    """The words as a text."""
    return "".join(f" {word}" for word in words)


def _tokens(target: Target, text: str, **options: bool) -> list[int]:
    answer = target.ask("/tokenize", {"model": target.model, "prompt": text, **options})
    tokens: list[int] = answer["tokens"]
    return tokens
