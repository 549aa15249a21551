"""Counts the patterns of a schema that apply to one text.

llguidance intersects the patterns that `allOf` and references combine in one place, and checks
whether any text is left. Its time for that doubles with each pattern, and nothing interrupts it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.grammars.finite_schemas import UNKNOWN, list_of, target_of

MAX_STEPS = 100_000
_KEYS, _ITEMS, _OTHERS = "\0keys", "\0items", "\0others"  # no names of properties
_LENGTHS = ("minLength", "maxLength")


class _TooMuch(Exception):
    """The schema is too large to count."""


@dataclass(slots=True)
class _Place:
    """A place in a value: the number of patterns that apply there, and the places below it."""

    count: int = 0
    inner: dict[str, _Place] = field(default_factory=dict)


def patterns_together(schema: Any) -> int:
    """The most patterns, formats and lengths that apply to one text: the numbers of `allOf` add up;
    of alternatives, the largest number counts. `MAX_STEPS` if the schema is too large to count."""
    counter = _Counter(schema)
    try:
        counter.of(schema, frozenset(("#",)))
        counter.begin_again()
        counter.of(schema, frozenset(("#",)))
    except (_TooMuch, RecursionError):
        return MAX_STEPS
    return counter.most


class _Counter:
    """Goes through a schema, and follows its references. A reference within a circle counts what
    the previous pass found at its target. One that leads back to its own place, or to an unknown
    place, counts all patterns of the schema."""

    def __init__(self, root: Any) -> None:
        self.most = 0
        self._root = root
        self._by_reference: dict[str, _Place] = {}
        self._former: dict[str, _Place] = {}
        self._num_steps = 0
        self._all: int | None = None

    def begin_again(self) -> None:
        """Begin another pass."""
        self._former, self._by_reference = self._by_reference, {}

    def of(self, schema: Any, followed: frozenset[str]) -> _Place:
        """The count of a value under a schema that the references `followed` have led to. Raises
        _TooMuch and RecursionError."""
        self._step()
        if not isinstance(schema, dict):
            return _Place()
        own = _Place(_num_patterns(schema), self._inner(schema))
        parts = [own, *(self.of(each, followed) for each in list_of(schema, "allOf"))]
        for key in ("anyOf", "oneOf"):
            branches = [self.of(each, followed) for each in list_of(schema, key)]
            parts.append(self._merged(branches, max))
        if isinstance(schema.get("$ref"), str):
            parts.append(self._referred(schema["$ref"], followed))
        return self._merged(parts, int.__add__)

    def _inner(self, schema: dict[str, Any]) -> dict[str, _Place]:
        nothing: frozenset[str] = frozenset()
        named, by_pattern = _dict(schema, "properties"), _dict(schema, "patternProperties")
        places = {name: self.of(each, nothing) for name, each in named.items()}
        places |= {f"\0{name}": self.of(each, nothing) for name, each in by_pattern.items()}
        keys = (_Place(len(by_pattern)), self.of(schema.get("propertyNames"), nothing))
        places[_KEYS] = self._merged(keys, int.__add__)
        first = [self.of(each, nothing) for each in list_of(schema, "prefixItems")]
        items = (self._merged(first, max), self.of(schema.get("items"), nothing))
        places[_ITEMS] = self._merged(items, int.__add__)
        places[_OTHERS] = self.of(schema.get("additionalProperties"), nothing)
        return {name: place for name, place in places.items() if place.count or place.inner}

    def _referred(self, reference: str, followed: frozenset[str]) -> _Place:
        target = target_of(self._root, reference)
        if target is UNKNOWN or reference in followed:
            return _Place(self._num_all())
        found = self._by_reference.get(reference)
        if found is None:
            self._by_reference[reference] = self._former.get(reference, _Place())
            found = self.of(target, followed | {reference})
            self._by_reference[reference] = found
        return found

    def _num_all(self) -> int:
        """All patterns of the whole schema."""
        if self._all is None:
            self._all, waiting = 0, [self._root]
            while waiting:
                part = waiting.pop()
                self._step()
                if isinstance(part, dict):
                    self._all += _num_patterns(part)
                    waiting.extend(part.values())
                elif isinstance(part, list):
                    waiting.extend(part)
        return self._all

    def _merged(self, places: Sequence[_Place], add: Callable[[int, int], int]) -> _Place:
        """The places merged into one; `add` combines two of their counts."""
        self.most = max(self.most, places[0].count if len(places) == 1 else 0)
        whole: _Place | None = None
        for place in places:
            whole = place if whole is None else self._both(whole, place, add)
        return _Place() if whole is None else whole

    def _both(self, one: _Place, other: _Place, add: Callable[[int, int], int]) -> _Place:
        self._step()
        if not other.count and not other.inner:
            self.most = max(self.most, one.count)
            return one
        inner = dict(one.inner)
        for name, place in other.inner.items():
            inner[name] = self._both(inner[name], place, add) if name in inner else place
        whole = _Place(add(one.count, other.count), inner)
        self.most = max(self.most, whole.count)
        return whole

    def _step(self) -> None:
        self._num_steps += 1
        if self._num_steps > MAX_STEPS:
            raise _TooMuch


def _dict(schema: dict[str, Any], key: str) -> dict[str, Any]:
    value = schema.get(key)
    return value if isinstance(value, dict) else {}


def _num_patterns(schema: dict[str, Any]) -> int:
    return ("pattern" in schema) + ("format" in schema) + any(key in schema for key in _LENGTHS)
