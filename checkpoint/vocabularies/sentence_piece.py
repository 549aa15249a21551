"""SentencePiece's own file, `tokenizer.model`: BPE with a score for each piece.

The file is a protobuf message, defined in SentencePiece's `sentencepiece_model.proto`
(https://github.com/google/sentencepiece). Only the fields that are needed here are read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpoint.regular_file import read_small
from checkpoint.vocabularies.bpe import scored_pieces, whole_tokenizer
from checkpoint.vocabularies.vocabulary import NORMAL, Vocabulary
from protocol.errors import ModelLoadError

_MAX_BYTES = 64 * 1024 * 1024
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5
"""Types of fields on the wire."""
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _BPE, _BYTE_FALLBACK = 3, 2, 35
_SPECIAL = {"unk_token": (40, 0), "bos_token": (41, 1), "eos_token": (42, 2)}
"""The fields of special tokens' ids, and their defaults."""
_CHARACTERS, _HAS_PREFIX, _SQUEEZES_SPACES = 2, 3, 4


def sentence_piece_tokenizer(file: Path) -> dict[str, Any]:
    """The content of a tokenizer.json. Raises ModelLoadError, also for other models than BPE, and
    for one that normalizes texts."""
    try:
        model = _Message(read_small(file, _MAX_BYTES))
        pieces = [_Message(each) for each in model.all(_PIECES)]
        trainer, normalizer = _Message(model.bytes(_TRAINER)), _Message(model.bytes(_NORMALIZER))
        tokens = [each.bytes(_TEXT).decode() for each in pieces]
        scores = [each.float(_SCORE) for each in pieces]
        types = [each.integer(_TYPE, NORMAL) for each in pieces]
        is_bpe = trainer.integer(_MODEL_TYPE, 1) == _BPE
        has_fallback = trainer.integer(_BYTE_FALLBACK, 0)
        ids = {name: trainer.integer(*field) for name, field in _SPECIAL.items()}
        normalizes = normalizer.bytes(_CHARACTERS) or normalizer.integer(_SQUEEZES_SPACES, 1)
        has_prefix = bool(normalizer.integer(_HAS_PREFIX, 1))
    except ValueError as error:
        raise ModelLoadError(f"{file} is not a model of SentencePiece") from error
    if not is_bpe or not has_fallback:
        raise ModelLoadError(f"{file}: the model must be BPE with byte fallback")
    if normalizes:
        raise ModelLoadError(f"{file}: a model that normalizes texts is not supported")
    if not tokens:
        raise ModelLoadError(f"{file}: the vocabulary is empty")
    if len(set(tokens)) < len(tokens):
        raise ModelLoadError(f"{file}: two tokens of the vocabulary are equal")
    vocabulary = Vocabulary(tokens, types)
    special = {
        name: vocabulary.use_special(id_) for name, id_ in ids.items() if 0 <= id_ < len(tokens)
    }
    parts = scored_pieces(str(file), vocabulary, scores, has_prefix, special.get("unk_token"))
    return whole_tokenizer(vocabulary, parts, special, ("bos_token",))


class _Message:
    """The fields of a protobuf message by number; of a field that is there several times, the last
    one counts. Raises ValueError if the bytes are no message."""

    def __init__(self, content: bytes) -> None:
        self._fields: dict[int, list[bytes | int]] = {}
        for number, value in _fields(content):
            self._fields.setdefault(number, []).append(value)

    def all(self, number: int) -> list[bytes]:
        """A repeated field of bytes."""
        found = self._fields.get(number, [])
        return [value for value in found if isinstance(value, bytes)]

    def bytes(self, number: int) -> bytes:
        """A field of bytes; empty without it."""
        return next(reversed(self.all(number)), b"")

    def integer(self, number: int, default: int) -> int:
        """An integer of 32 bits with its sign."""
        value = next(reversed(self._fields.get(number, [])), default)
        if not isinstance(value, int):
            raise ValueError(f"field {number} is no integer")
        return value - (1 << 64) if value >> 63 else value

    def float(self, number: int) -> float:
        """A number of 4 bytes; 0 without it."""
        value = self.bytes(number)
        return float(struct.unpack("<f", value)[0]) if len(value) == 4 else 0.0


def _fields(content: bytes) -> Iterator[tuple[int, bytes | int]]:
    place = 0
    while place < len(content):
        tag, place = _varint(content, place)
        kind = tag & 7
        if kind == _VARINT:
            value, place = _varint(content, place)
            yield tag >> 3, value
            continue
        size = {_DOUBLE: 8, _FLOAT: 4}.get(kind)
        if kind == _BYTES:
            size, place = _varint(content, place)
        if size is None or place + size > len(content):
            raise ValueError("the message is cut off")
        yield tag >> 3, content[place : place + size]
        place += size


def _varint(content: bytes, place: int) -> tuple[int, int]:
    """An integer in groups of seven bits, lower groups first, and the place behind it."""
    value = 0
    for number, byte in enumerate(content[place : place + 10]):
        value |= (byte & 127) << 7 * number
        if byte < 128:
            return value, place + number + 1
    raise ValueError("the message is cut off")
