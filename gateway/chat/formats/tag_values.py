"""Values of arguments that stand in tags: text as it is, and all else as JSON.

A tool's schema says which of the two a value is, since `5` may be a number or a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.chat.json_value import mended

Kinds = frozenset[str]
"""JSON schema's names of types."""
TEXT = frozenset(("string",))
_SCALARS = frozenset(("string", "integer", "number", "boolean", "null"))
_ALTERNATIVES = ("anyOf", "oneOf")
_PYTHON_CONSTANTS = frozenset(("None", "True", "False"))
_INTEGER = re.compile(r"-?[0-9]+", re.ASCII)
_KIND_OF_START = {
    '"': "string", "{": "object", "[": "array", "n": "null", "t": "boolean", "f": "boolean",
}  # fmt: skip
_KIND_OF_VALUE: tuple[tuple[type, str], ...] = (
    (bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"),
    (dict, "object"), (object, "null"),
)  # fmt: skip
_MAX_NESTING = 8
_MAX_ALTERNATIVES = 8
_MAX_CHOICES = 10_000
MAX_SCALAR_CHARS = 64
"""Where the schema allows text, a longer value is text, even if it reads as a number."""


def kinds_of_arguments(schema: Mapping[str, Any]) -> dict[str, Kinds | None]:
    """The types that a tool's schema allows for each argument that it lists; None if it allows any,
    or nests too deeply. Each definition is read once."""
    followed: dict[str, Kinds | None] = {}
    return {key: _kinds(each, schema, followed, 0) for key, each in _properties(schema).items()}


def choices_of_arguments(schema: Mapping[str, Any]) -> dict[str, list[Any] | None]:
    """The values that a tool's schema lists (`enum`, `const`) for each argument; None if it allows
    others, or lists too many. Each definition is read once."""
    followed: dict[str, list[Any] | None] = {}
    return {key: _choices(each, schema, followed, 0) for key, each in _properties(schema).items()}


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _kinds(
    wanted: Any, root: Mapping[str, Any], followed: dict[str, Kinds | None], depth: int
) -> Kinds | None:
    """`followed` has the references met so far, so that each is followed once."""
    if not isinstance(wanted, dict) or depth > _MAX_NESTING:
        return None
    found: list[Kinds | None] = []
    named = wanted.get("type")
    if isinstance(named, str | list):
        found.append(frozenset([named] if isinstance(named, str) else map(str, named)))
    if isinstance(wanted.get("enum"), list):
        found.append(frozenset(map(_kind, wanted["enum"])))
    if "const" in wanted:
        found.append(frozenset((_kind(wanted["const"]),)))
    for word in _ALTERNATIVES:
        if isinstance(wanted.get(word), list):
            found.append(
                _joined([_kinds(each, root, followed, depth + 1) for each in wanted[word]])
            )
    reference = wanted.get("$ref")
    if isinstance(reference, str):
        if reference not in followed:
            followed[reference] = frozenset()
            referred = _referred(reference, root)
            followed[reference] = _kinds(referred, root, followed, depth + 1)
        found.append(followed[reference])
    if isinstance(wanted.get("allOf"), list):
        found += [_kinds(each, root, followed, depth + 1) for each in wanted["allOf"]]
    known = [_with_integers(each) for each in found if each is not None]
    return frozenset.intersection(*known) if known else None


def _joined(kinds: Sequence[Kinds | None]) -> Kinds | None:
    known = [each for each in kinds if each is not None]
    return frozenset[str]().union(*known) if len(known) == len(kinds) else None


def _with_integers(kinds: Kinds) -> Kinds:
    return kinds | {"integer"} if "number" in kinds else kinds


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """The definition of this name; None if there is none."""
    for word in ("$defs", "definitions"):
        definitions = root.get(word)
        prefix = f"#/{word}/"
        if reference.startswith(prefix) and isinstance(definitions, dict):
            return definitions.get(reference.removeprefix(prefix))
    return None


def _kind(value: Any) -> str:
    return next(name for types, name in _KIND_OF_VALUE if isinstance(value, types))


def _choices(
    wanted: Any, root: Mapping[str, Any], followed: dict[str, list[Any] | None], depth: int
) -> list[Any] | None:
    """`followed` is as in `_kinds`."""
    if not isinstance(wanted, dict) or depth > _MAX_NESTING:
        return None
    if isinstance(wanted.get("enum"), list):
        return list(wanted["enum"])
    if "const" in wanted:
        return [wanted["const"]]
    if wanted.get("type") == "null":
        return [None]
    reference = wanted.get("$ref")
    if isinstance(reference, str):
        if reference not in followed:
            followed[reference] = None
            referred = _referred(reference, root)
            followed[reference] = _choices(referred, root, followed, depth + 1)
        return followed[reference]
    match wanted.get("allOf"):
        case [only]:
            return _choices(only, root, followed, depth + 1)
    alternatives = next((wanted[word] for word in _ALTERNATIVES if word in wanted), None)
    if not isinstance(alternatives, list) or len(alternatives) > _MAX_ALTERNATIVES:
        return None
    listed: list[Any] = []
    for each in alternatives:
        more = _choices(each, root, followed, depth + 1)
        if more is None or len(listed) + len(more) > _MAX_CHOICES:
            return None
        listed += more
    return listed


def is_text_or_scalar(kinds: Kinds) -> bool:
    """Whether a value is text, unless it is a number or a constant that the schema allows."""
    return "string" in kinds and kinds <= _SCALARS


def json_of(text: str, kinds: Kinds) -> str:
    """The JSON of a whole value. Text that is no JSON of these kinds is a string."""
    inner = text.strip()
    if not is_text_or_scalar(kinds):
        found = mended(inner)
        may_be = found is not None and ("string" not in kinds or _kind_of_json(found) in kinds)
        return found if found is not None and may_be else quoted(text)
    if inner not in _PYTHON_CONSTANTS and not _is_json(inner):
        return quoted(text)
    found = mended(inner)
    return found if found is not None and _kind_of_json(found) in kinds - TEXT else quoted(text)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _kind_of_json(text: str) -> str:
    kind = _KIND_OF_START.get(text[0])
    return kind or ("integer" if _INTEGER.fullmatch(text) else "number")


def quoted(text: str) -> str:
    """The text as a string of JSON."""
    return json.dumps(text, ensure_ascii=False)
