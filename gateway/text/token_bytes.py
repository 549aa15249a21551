"""The bytes that each token of a vocabulary contributes to the text.

Text is the UTF-8 decoding of the concatenated bytes of its tokens, which makes incremental
decoding exact and cheap. This holds for byte-level BPE and for SentencePiece-style vocabularies
(with or without byte fallback), and so for every architecture that Baton serves. A
`tokenizer.json` with another kind of decoder is refused at load. Knows nothing of requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from tokenizers import Tokenizer as HfTokenizer

from checkpoint.vocabularies.byte_alphabet import byte_alphabet
from protocol.errors import ModelLoadError

SUPPORTED_DECODERS = (
    "ByteLevel",
    "ByteFallback",
    "Fuse",
    "Metaspace",
    "Replace",
    "Sequence",
    "Strip",
)

_Rule = Callable[[str], str | bytes]
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of tokens, computed once each and cached.

    `texts` has the text of each known token whose bytes are whole characters.
    `strips_leading_space` says that a text's first leading space belongs to the encoding, not to
    the text.
    """

    def __init__(self, tokenizer: HfTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        self.texts: dict[int, str] = {}
        self.strips_leading_space = False
        self._rules: list[_Rule] = []
        self._compile(json.loads(tokenizer.to_str())["decoder"])

    def of(self, token_id: int) -> bytes:
        """Bytes of a token; empty for an id that names no token."""
        found = self._known.get(token_id)
        if found is None:
            computed = self._compute(token_id)
            if computed is None:
                return b""
            found = self._known[token_id] = computed
            with suppress(UnicodeDecodeError):
                self.texts[token_id] = found.decode()
        return found

    def pieces(self, token_ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token."""
        try:
            return list(map(self._known.__getitem__, token_ids))
        except KeyError:
            return list(map(self.of, token_ids))

    def _compute(self, token_id: int) -> bytes | None:
        value: str | bytes | None = self._tokenizer.id_to_token(token_id)
        if value is None:
            return None
        for rule in self._rules:
            if isinstance(value, bytes):
                return value
            value = rule(value)
        return value if isinstance(value, bytes) else value.encode()

    def _compile(self, decoder: dict[str, Any] | None) -> None:
        kind = decoder["type"] if decoder else "none"
        if decoder is None or kind not in SUPPORTED_DECODERS:
            raise ModelLoadError(
                f"tokenizer.json: decoder {kind!r} is not supported; "
                f"supported are {', '.join(SUPPORTED_DECODERS)}"
            )
        if kind == "Sequence":
            for part in decoder["decoders"]:
                self._compile(part)
        elif kind == "ByteLevel":
            self._rules.append(_byte_level)
        elif kind == "ByteFallback":
            self._rules.append(_byte_fallback)
        elif kind == "Metaspace":
            self._rules.append(_replacing(decoder["replacement"], " "))
            self.strips_leading_space |= decoder.get("prepend_scheme", "always") != "never"
        elif kind == "Replace":
            self._rules.append(_replacing(_literal(decoder["pattern"]), decoder["content"]))
        elif kind == "Strip":
            self._compile_strip(decoder)

    def _compile_strip(self, decoder: dict[str, Any]) -> None:
        if (decoder["content"], decoder["start"], decoder["stop"]) != (" ", 1, 0):
            raise ModelLoadError(
                "tokenizer.json: decoder 'Strip' is supported for one leading space only, "
                f"not for {decoder}"
            )
        self.strips_leading_space = True


_BYTE_OF = byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:  # an added token: plain text outside the byte alphabet
        return token.encode()


def _byte_fallback(token: str) -> str | bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match.group(1), 16)]) if match else token


def _replacing(old: str, new: str) -> _Rule:
    return lambda token: token.replace(old, new)


def _literal(pattern: dict[str, str]) -> str:
    if "String" not in pattern:
        raise ModelLoadError(f"tokenizer.json: decoder 'Replace' with {pattern} is not supported")
    return pattern["String"]
