"""Typed access to the keys of an untrusted JSON object.

Owns the wording of errors in a file: every error is one `ModelLoadError` that names the file, the
key, the value found and the value expected. Does not know what the keys mean. A key whose value
is null counts as absent, as in Hugging Face's configuration files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoint.regular_file import MAX_SMALL_BYTES, read_text
from protocol.errors import ModelLoadError

MAX_INTEGER = 2**31 - 1
MAX_NUMBER = 1e15

REQUIRED: Any = object()
"""Default that makes a missing key an error."""


def read_json_object(path: Path, max_bytes: int = MAX_SMALL_BYTES) -> dict[str, Any]:
    """The JSON object in the file `path`. Raises ModelLoadError if it cannot be read or parsed."""
    try:
        value = json.loads(read_text(path, max_bytes))
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ModelLoadError(f"{path} is nested too deeply") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not {_describe(value)}")
    return value


class JsonKeys:
    """Reads keys of `values`; `where` is the file (and object) that errors name."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def raw(self, key: str, default: Any = REQUIRED) -> Any:
        """The unchecked value, or `default`; raises ModelLoadError if a required key is missing."""
        value = self.values.get(key)
        if value is not None:
            return value
        if default is REQUIRED:
            raise ModelLoadError(f"{self.where}: the key {key!r} is missing")
        return default

    def integer(
        self, key: str, default: Any = REQUIRED, minimum: int = 1, maximum: int = MAX_INTEGER
    ) -> Any:
        """An integer from `minimum` to `maximum` (whole floats are accepted), or `default`."""
        value = self.raw(key, default)
        if value is default:
            return value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.wrong(key, f"an integer of at least {minimum}")
        if value > maximum:
            raise self.wrong(key, f"an integer of at most {maximum}")
        return value

    def number(
        self,
        key: str,
        default: Any = REQUIRED,
        above: float = 0.0,
        maximum: float = MAX_NUMBER,
    ) -> Any:
        """A number greater than `above` and at most `maximum`, as float, or `default`."""
        value = self.raw(key, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(key, f"a number greater than {above:g}")
        if value <= above or value in (math.inf, -math.inf) or value != value:
            raise self.wrong(key, f"a finite number greater than {above:g}")
        if value > maximum:
            raise self.wrong(key, f"a number of at most {maximum:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false, or `default`."""
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: Any = REQUIRED) -> Any:
        """A string, or `default`."""
        value = self.raw(key, default)
        if value is not default and not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """The token ids under `key`, a single id or a list; empty if the key is absent."""
        value = self.raw(key, ())
        ids = value if isinstance(value, (list, tuple)) else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise self.wrong(key, "a token id or a list of token ids")
            if not 0 <= token_id <= MAX_INTEGER:
                raise self.wrong(key, "a token id or a list of token ids")
        return tuple(ids)

    def table(self, key: str) -> JsonKeys | None:
        """The object under `key`, or None if the key is absent."""
        value = self.raw(key, None)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return JsonKeys(value, f"{self.where}: {_short(json.dumps(key)[1:-1])}")

    def wrong(self, key: str, expected: str) -> ModelLoadError:
        """The error that states the value of `key` and the expected one."""
        found = _describe(self.values.get(key))
        return ModelLoadError(f"{self.where}: {key!r} must be {expected}, not {found}")


def _describe(value: Any) -> str:
    try:
        text = json.dumps(value, default=str)
    except RecursionError:
        return "a value that is nested too deeply"
    return _short(text)


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
