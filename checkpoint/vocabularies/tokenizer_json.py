"""The tokenizer of a checkpoint as the content of a tokenizer.json, whichever file holds it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoint.regular_file import is_there, read_text
from checkpoint.vocabularies.ranked_tokens import (
    TEKKEN_SPECIAL,
    tekken_tokenizer,
    tiktoken_tokenizer,
)
from checkpoint.vocabularies.sentence_piece import sentence_piece_tokenizer

MAX_TOKENIZER_BYTES = 256 * 1024 * 1024
_USUAL = "tokenizer.json"
_TEKKEN = "tekken.json"
_OTHERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    _TEKKEN: tekken_tokenizer,
    "tiktoken.model": tiktoken_tokenizer,
    "tokenizer.model": sentence_piece_tokenizer,
}
"""Other files of vocabularies. The first one that is there is read."""


def tokenizer_file(folder: Path) -> Path:
    """The file that holds the folder's tokenizer: tokenizer.json, also if there is none, or one of
    the others in its place."""
    found = (folder / name for name in (_USUAL, *_OTHERS))
    return next(filter(is_there, found), folder / _USUAL)


def tokenizer_json_of(file: Path) -> str:
    """The content of a tokenizer.json, or what is made of another `tokenizer_file`. Raises
    ModelLoadError."""
    make = _OTHERS.get(file.name)
    if make is None:
        return read_text(file, MAX_TOKENIZER_BYTES)
    return json.dumps(make(file))


def path_or_content(file: Path) -> str:
    """The path of a tokenizer.json, or the content that is made of another `tokenizer_file`. Raises
    ModelLoadError."""
    return tokenizer_json_of(file) if file.name in _OTHERS else str(file)


def special_tokens_of(file: Path) -> dict[str, str]:
    """The special tokens that a file's form implies, by their names in tokenizer_config.json."""
    return dict(TEKKEN_SPECIAL) if file.name == _TEKKEN else {}
