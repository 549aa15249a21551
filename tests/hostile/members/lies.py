"""Lying messages: every field of every message, one after the other, with a value that no honest
process sends.

Made from the message types, so that a new message or field is included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

from tests.fuzz.seeds import variants

HUGE_TEXT = 20_000
_INTS = (-1, 0, -(2**63), 2**31, 2**63 - 1, 2**64 - 1)
_FLOATS = (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e308)
_TEXTS = ("", "x" * HUGE_TEXT, "\x00\x1b]52;c;\u202e", "<script>alert(1)</script>")
_BYTES = (b"", b"\xff" * HUGE_TEXT)


def lies(union: Any, **true: Any) -> Iterator[tuple[str, bytes]]:
    """Yields each lie's name and MessagePack. `true` holds fields that keep their honest values,
    unless the lie is about them."""
    for message in variants(union):
        fields = [each.name for each in inspect.type_info(type(message)).fields]  # type: ignore[union-attr]
        known = {name: value for name, value in true.items() if name in fields}
        honest = msgspec.structs.replace(message, **known)
        for path, value in _of_struct(honest):
            plain = msgspec.to_builtins(honest, builtin_types=(bytes,))
            _put(plain, path, value)
            where = ".".join(map(str, path))
            yield (
                f"{type(message).__name__}.{where} = {value!r:.40}",
                msgspec.msgpack.encode(plain),
            )


Path = tuple[Any, ...]


def _of_struct(message: msgspec.Struct, prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    info = inspect.type_info(type(message))
    assert isinstance(info, inspect.StructType)
    for place, each in enumerate(info.fields):
        key = place if info.array_like else each.encode_name
        yield from _of(each.type, getattr(message, each.name), (*prefix, key))


def _of(kind: inspect.Type, value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    match kind:
        case inspect.IntType():
            yield from ((path, lie) for lie in _INTS)
        case inspect.FloatType():
            yield from ((path, lie) for lie in _FLOATS)
        case inspect.StrType():
            yield from ((path, lie) for lie in _TEXTS)
        case inspect.BytesType():
            yield from ((path, lie) for lie in _BYTES)
        case inspect.UnionType(types=types):
            filled = [each for each in types if not isinstance(each, inspect.NoneType)]
            yield from _of(filled[0], value, path)
        case inspect.StructType():
            yield from _of_struct(value, path)
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            plain = msgspec.to_builtins(list(value), builtin_types=(bytes,))
            yield (path, [])
            yield (path, plain * -(-HUGE_TEXT // len(plain)))
            yield from _of(item, value[0], (*path, 0))
        case inspect.TupleType(item_types=items):
            for place, item in enumerate(items):
                yield from _of(item, value[place], (*path, place))
        case inspect.DictType(key_type=key, value_type=item):
            first = next(iter(value))
            many = (
                range(HUGE_TEXT) if isinstance(key, inspect.IntType) else map(str, range(HUGE_TEXT))
            )
            yield (path, dict.fromkeys(many, msgspec.to_builtins(value[first])))
            for lie in _INTS if isinstance(key, inspect.IntType) else _TEXTS:
                yield (path, {lie: value[first]})
            yield from _of(item, value[first], (*path, first))


def _put(plain: Any, path: Path, value: Any) -> None:
    *way, last = path
    for step in way:
        if isinstance(plain[step], tuple):
            plain[step] = list(plain[step])
        plain = plain[step]
    plain[last] = value
