"""Validation only notes that some fields will be ignored. `gateway.api.unknown_fields.ignored`
finds their names afterwards, only if there are any. Unknown values are kept until then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import AfterValidator, ValidationInfo


class Findings:
    """The context of one validation: whether anything in the body is ignored."""

    __slots__ = ("any",)

    def __init__(self) -> None:
        self.any = False


def note_unknown(value: Any, info: ValidationInfo) -> Any:
    """Note an unknown field, unless its value is null, which means absent."""
    if value is not None:
        note(info)
    return value


def note(info: ValidationInfo) -> None:
    """Note that something is to be ignored. Does nothing without a context."""
    if isinstance(info.context, Findings):
        info.context.any = True


@dataclass(frozen=True)
class Ignorable(AfterValidator):
    """See `ignorable` and `ignorable_entries`; `names` has the ignored parts of a value, "" for
    the value as a whole."""

    names: Callable[[Any], list[str]]
    described: str

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        return {**handler(core_schema), "description": self.described}


def ignorable(*neutral: Any) -> Ignorable:
    """A known field that Baton does not honour: null and the `neutral` values ask for nothing,
    all others are ignored and named."""

    def names(value: Any) -> list[str]:
        is_neutral = any(type(value) is type(each) and value == each for each in neutral)
        return [] if value is None or is_neutral else [""]

    shown = ", ".join(["null", *map(repr, neutral)])
    return _ignorable(names, f"Ignored, and named in `x-baton-ignored` unless it is {shown}.")


def ignorable_entries(*known: str) -> Ignorable:
    """A list of texts. Only the `known` texts are honoured; the others are named."""

    def names(values: Any) -> list[str]:
        unknown = dict.fromkeys(each for each in values or () if each not in known)
        return [f"[{each}]" for each in unknown]

    return _ignorable(names, f"Others than {', '.join(known)} are ignored and named.")


def ignorable_if(is_ignored: Callable[[Any], bool], described: str) -> Ignorable:
    """A field that is named as ignored in part if `is_ignored` returns True for its value."""
    return _ignorable(lambda value: [""] if is_ignored(value) else [], described)


def _ignorable(names: Callable[[Any], list[str]], described: str) -> Ignorable:
    def check(value: Any, info: ValidationInfo) -> Any:
        if names(value):
            note(info)
        return value

    return Ignorable(check, names, described)
