"""A vocabulary: the text and the type of each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NORMAL, _UNKNOWN, CONTROL, USER_DEFINED, _UNUSED = range(1, 6)


@dataclass(frozen=True)
class Vocabulary:
    """The tokens by id, and the type of each, as SentencePiece and GGUF number them."""

    tokens: list[str]
    types: list[int]

    def ids(self) -> dict[str, int]:
        """The ids of tokens by text, without those that only fill up the vocabulary."""
        pairs = enumerate(zip(self.tokens, self.types, strict=True))
        return {token: id_ for id_, (token, kind) in pairs if kind != _UNUSED}

    def use_special(self, id_: int) -> str:
        """The text of a special token. Such a token is in use, even if its type says otherwise."""
        if self.types[id_] == _UNUSED:
            self.types[id_] = CONTROL
        return self.tokens[id_]

    def added(self) -> list[dict[str, Any]]:
        """The tokens that are found in a text before it is split, in tokenizer.json's form."""
        return [
            {
                "id": id_,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind != USER_DEFINED,
            }
            for id_, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (_UNKNOWN, CONTROL, USER_DEFINED) and token
        ]
