"""Values of the types that clients' own packages declare for the histories that they send."""

from __future__ import annotations

import collections.abc
import types
import typing
from collections.abc import Iterator
from typing import Any

import typing_extensions

MOST_DEEP = 12


def members(union: Any) -> list[Any]:
    """The types that a union consists of."""
    return [each for each in typing.get_args(union) if isinstance(each, type)]


def kind_of(type_: Any) -> str:
    """The value of a type's field `type`, which is a literal."""
    return next(samples(typing_extensions.get_type_hints(type_)["type"]))


def samples(type_: Any, depth: int = 0) -> Iterator[Any]:
    """Values of a type: each branch of a union in it is in one of them, and each key is missing in
    one of them unless it is required."""
    origin, args = typing.get_origin(type_), typing.get_args(type_)
    if type_ is Any or type_ is object or depth > MOST_DEEP:
        yield {"a": 1}
    elif origin is typing.Literal:
        yield args[0]
    elif origin in (typing.Union, types.UnionType):
        for each in args:
            if each is not type(None) and not getattr(each, "__module__", "").startswith("os"):
                yield from samples(each, depth)
    elif origin in (list, collections.abc.Iterable, collections.abc.Sequence):
        for each in samples(args[0], depth + 1):
            yield [each]
    elif origin is dict or type_ is dict:
        yield {"a": "x"}
    elif typing_extensions.is_typeddict(type_):
        yield from _objects(type_, depth + 1)
    else:
        yield {str: "x", int: 1, float: 0.5, bool: True}.get(type_, "x")


def _objects(type_: Any, depth: int) -> Iterator[dict[str, Any]]:
    hints = typing_extensions.get_type_hints(type_)
    choices = {name: list(samples(hint, depth)) for name, hint in hints.items()}
    whole = {name: values[0] for name, values in choices.items()}
    yield whole
    declared = typing_extensions.get_type_hints(type_, include_extras=True)
    required = [name for name in declared if typing.get_origin(declared[name]) is typing.Required]
    yield {name: whole[name] for name in {"type", *required} if name in whole}
    for name, values in choices.items():
        for value in values[1:]:
            yield {**whole, name: value}
