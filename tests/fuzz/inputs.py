"""Nearly valid inputs: valid ones with changed bits, bytes, values and structure.

Half of the inputs are changed as bytes (flips, cuts, splices, repeats), half as decoded trees: a
value anywhere in the tree is replaced by one of another type or size, removed, or nested deeply.
The random generator that is passed in determines all inputs.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

MAX_NESTING = 3000
_EDGES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63 - 1, 2**64 - 1, -(2**63), 1e308, -0.0, 5e-324,
    float("inf"), float("nan"), "", "\x00", "😀" * 40, "a" * 5000, [], {}, [[]], [None], {"": {}},
)  # fmt: skip
_HUGE = (b"9" * 400, b"-1e99999", b"0xffffffffffffffff", b"\xff" * 16, b"\x00" * 64)


@dataclass(frozen=True)
class Codec:
    """Converts trees to bytes and back; `nested` makes the given number of empty levels."""

    load: Callable[[bytes], Any]
    dump: Callable[[Any], bytes]
    nested: Callable[[int], bytes]


JSON = Codec(
    json.loads,
    lambda tree: json.dumps(tree).encode(),
    lambda depth: b'{"a":' * depth + b"[" * depth,
)
MESSAGE_PACK = Codec(
    msgspec.msgpack.decode,
    msgspec.msgpack.encode,
    lambda depth: b"\x81\xa1a" * depth + b"\x91" * depth,
)
BYTES_ONLY = Codec(lambda data: None, lambda tree: b"", lambda depth: b"(" * depth)


class Mutator:
    """Makes inputs from valid ones."""

    def __init__(self, rng: random.Random, codec: Codec, seeds: Sequence[bytes]) -> None:
        """`seeds` are valid inputs that the codec can decode."""
        self._rng = rng
        self._codec = codec
        self._seeds = seeds
        self._byte_changes = (self._flip, self._cut, self._splice, self._repeat, self._stuff)

    def next(self) -> bytes:
        """The next input; now and then an unchanged seed."""
        rng = self._rng
        data = rng.choice(self._seeds)
        if rng.random() < 0.02:
            return data
        if rng.random() < 0.5 and self._codec is not BYTES_ONLY:
            data = self._change_tree(data)
            if rng.random() < 0.7:
                return data
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            data = rng.choice(self._byte_changes)(data)
        return data

    # -- bytes ------------------------------------------------------------------------------

    def _flip(self, data: bytes) -> bytes:
        if not data:
            return data
        changed = bytearray(data)
        for _ in range(self._rng.choice((1, 1, 2, 8))):
            changed[self._rng.randrange(len(changed))] ^= 1 << self._rng.randrange(8)
        return bytes(changed)

    def _cut(self, data: bytes) -> bytes:
        start = self._at(data) if self._rng.random() < 0.2 else 0
        return data[start : self._at(data)]

    def _splice(self, data: bytes) -> bytes:
        other = self._rng.choice(self._seeds)
        return data[: self._at(data)] + other[self._at(other) :]

    def _repeat(self, data: bytes) -> bytes:
        start, end = sorted((self._at(data), self._at(data)))
        return data[:end] + data[start:end] * self._rng.choice((1, 2, 20)) + data[end:]

    def _stuff(self, data: bytes) -> bytes:
        at = self._at(data)
        if self._rng.random() < 0.1:
            stuffing = self._codec.nested(self._rng.randrange(1, MAX_NESTING))
        elif self._rng.random() < 0.5:
            stuffing = self._rng.choice(_HUGE)
        else:
            stuffing = self._rng.randbytes(self._rng.randrange(1, 40))
        return data[:at] + stuffing + data[at:]

    def _at(self, data: bytes) -> int:
        return self._rng.randrange(len(data) + 1)

    # -- trees ------------------------------------------------------------------------------

    def _change_tree(self, data: bytes) -> bytes:
        tree = self._codec.load(data)
        for _ in range(self._rng.choice((1, 1, 2, 3))):
            tree = self._change(tree)
        return self._codec.dump(tree)

    def _change(self, tree: Any) -> Any:
        """The tree with one node changed; most often one far from the root."""
        rng = self._rng
        if isinstance(tree, dict) and tree and rng.random() < 0.9:
            key = rng.choice(list(tree))
            return self._change_entry(tree, key)
        if isinstance(tree, list) and tree and rng.random() < 0.8:
            index = rng.randrange(len(tree))
            return [*tree[:index], self._change(tree[index]), *tree[index + 1 :]]
        return self._value(tree)

    def _change_entry(self, tree: dict[Any, Any], key: Any) -> dict[Any, Any]:
        kind = self._rng.random()
        if kind < 0.15:
            return {name: value for name, value in tree.items() if name != key}
        if kind < 0.25:
            name = "".join(self._rng.choices(string.printable, k=self._rng.randrange(6)))
            return tree | {name: self._value(None)}
        return tree | {key: self._change(tree[key])}

    def _value(self, former: Any) -> Any:
        """A replacement for `former`: of the same type, of any type, or very deep or long."""
        rng = self._rng
        kind = rng.random()
        if kind < 0.3 and isinstance(former, int):
            return rng.choice((former ^ 1, former // -2, former << 31 & (2**63 - 1), float(former)))
        if kind < 0.3 and isinstance(former, str):
            return former + chr(rng.randrange(0xD7FF))
        if kind < 0.33:
            return [rng.choice(_EDGES)] * rng.randrange(100)
        if kind < 0.36:
            value: Any = []
            for _ in range(rng.randrange(200)):
                value = [value] if rng.random() < 0.5 else {"a": value}
            return value
        return rng.choice(_EDGES)
