"""A trace's file, plain or gzipped, and the fields of its lines, as untrusted input: errors are one
line that names file, line and field."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from protocol.errors import ConfigError

MAX_TOKENS = 1 << 24
MAX_ID = 1 << 40
_MAX_LINE = 1 << 26
_MAX_NUMBER = 1e15
_GZIP = b"\x1f\x8b"


class TraceLine:
    """One line's values by field; `where` is its file and number."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    def number(self, field: str, default: float | None = None, minimum: float = 0.0) -> float:
        """A number of at least `minimum`."""
        value = self._values.get(field, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not minimum <= value <= _MAX_NUMBER:
            raise self.wrong(field, f"a number from {minimum:g} to {_MAX_NUMBER:g}")
        return float(value)

    def integer(self, field: str, minimum: int = 1, maximum: int = MAX_TOKENS) -> int:
        """A whole number within the bounds."""
        value = self._values.get(field)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.wrong(field, f"a whole number from {minimum:,} to {maximum:,}")
        return value

    def integers(self, field: str) -> list[int]:
        """A list of whole numbers of at most 64 bits, with or without sign."""
        value = self._values.get(field)
        if not isinstance(value, list) or not all(map(_is_word, value)):
            raise self.wrong(field, "a list of whole numbers of at most 64 bits")
        return value

    def runs(self, field: str) -> tuple[tuple[int, int], ...]:
        """A list of pairs `[first id, count]`."""
        value = self._values.get(field)
        if not isinstance(value, list):
            raise self.wrong(field, "a list of pairs [first id, count]")
        for pair in value:
            is_pair = isinstance(pair, list) and len(pair) == 2 and all(map(_is_id, pair))
            if not is_pair or pair[1] > MAX_TOKENS:
                raise self.wrong(field, "a list of pairs [first id, count]")
        return tuple((first, count) for first, count in value)

    def text(self, field: str) -> str:
        """A string."""
        value = self._values.get(field)
        if not isinstance(value, str):
            raise self.wrong(field, "a text")
        return value

    def texts(self, field: str) -> list[str]:
        """A list of strings."""
        value = self._values.get(field)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.wrong(field, "a list of texts")
        return value

    def lines(self, field: str) -> list[TraceLine]:
        """A list of objects; empty if the field is missing."""
        value = self._values.get(field, [])
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            raise self.wrong(field, "a list of objects")
        return [TraceLine(each, f"{self._where}, {field} {n}") for n, each in enumerate(value)]

    def __contains__(self, field: str) -> bool:
        return self._values.get(field) is not None

    def wrong(self, field: str, expected: str) -> ConfigError:
        """The error that says what the field must be."""
        if field not in self._values:
            return ConfigError(f"{self._where}: {field!r} is missing; it must be {expected}")
        found = repr(self._values[field])
        found = found if len(found) <= 60 else f"{found[:57]}..."
        return ConfigError(f"{self._where}: {field!r} must be {expected}, not {found}")


def open_trace(path: Path) -> BinaryIO:
    """The file's bytes, unpacked if it is gzipped. Raises OSError."""
    with path.open("rb") as file:
        is_packed = file.read(len(_GZIP)) == _GZIP
    return cast(BinaryIO, gzip.open(path)) if is_packed else path.open("rb")


def json_lines(path: Path) -> Iterator[TraceLine]:
    """The objects of a file with one on each line; empty lines are skipped."""
    with open_trace(path) as file:
        number = 0
        while raw := file.readline(_MAX_LINE + 1):
            number += 1
            where = f"{path}, line {number}"
            if len(raw) > _MAX_LINE:
                raise ConfigError(f"{where}: it is longer than {_MAX_LINE:,} bytes")
            if raw.strip():
                yield TraceLine(_object(raw, where), where)


def _object(raw: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: it must hold a JSON object")
    return value


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_ID


def _is_word(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -1 << 63 <= value < 1 << 64
