"""Whether some finite JSON value follows a schema, and how deeply its references nest.

A schema that requires itself is endless. A schema with a long chain of references is finite, but
the library that compiles it follows them recursively, and would end the process with its stack.
Only references can make a schema endless. The check starts with no reference known to end, and
repeats while it finds more that do. Keywords that it does not understand are assumed to end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

MAX_VISITS = 100_000
_SCALARS = frozenset(("string", "number", "integer", "boolean", "null"))
_OLD_DIALECT = re.compile("draft-0[34]")
"""Dialects in which `id` is an identifier; in later ones it is an ordinary name."""
_ROOT = ""
UNKNOWN = object()


class _TooMuch(Exception):
    """The schema is too large for the check."""


def can_end(schema: Any) -> bool:
    """Whether a finite value may follow the schema."""
    targets = {each: target_of(schema, each) for each in _references(schema)}
    if not targets:
        return True
    search = _Search({name for name, target in targets.items() if target is UNKNOWN})
    try:
        while True:
            more = {
                name
                for name, target in targets.items()
                if name not in search.ending and search.ends(target)
            }
            if not more:
                return search.ends(schema)
            search.ending |= more
    except _TooMuch:
        return True


def nesting(schema: Any) -> int:
    """The greatest depth to which a compiler recurses into the schema: the longest path down, with
    references replaced by their targets. A path follows each reference once. `MAX_VISITS` if the
    schema is too large for the check."""
    references = list(_references(schema))
    targets = {each: target_of(schema, each) for each in references}
    if len(references) > MAX_VISITS:
        return MAX_VISITS
    if _has_own_bases(schema) or any(target is UNKNOWN for target in targets.values()):
        return _largest_nesting(schema)
    inner: dict[str, dict[str, int]] = {}
    own: dict[str, int] = {}
    num_visits = 0
    for name, target in ((_ROOT, schema), *targets.items()):
        inner[name], own[name] = {}, 0
        for part, level in _parts(target):
            num_visits += 1
            if num_visits > MAX_VISITS:
                return MAX_VISITS
            own[name] = max(own[name], level)
            reference = part.get("$ref") if isinstance(part, dict) else None
            if isinstance(reference, str):
                inner[name][reference] = max(inner[name].get(reference, 0), level + 1)
    return _longest_way(inner, own)


def _largest_nesting(schema: Any) -> int:
    """An upper bound of the nesting, for schemas with unknown targets. It assumes that every
    reference leads to all others."""
    deepest = total = 0
    for part, level in _parts(schema):
        deepest = max(deepest, level)
        if isinstance(part, dict) and isinstance(part.get("$ref"), str):
            total += level + 1
    return total + deepest


def _has_own_bases(schema: Any) -> bool:
    """Whether a part of the schema has an identifier, to which its references are relative."""
    inner = [part for part, level in _parts(schema) if level and isinstance(part, dict)]
    dialects = (part.get("$schema") for part in (schema, *inner) if isinstance(part, dict))
    is_old = any(isinstance(each, str) and _OLD_DIALECT.search(each) for each in dialects)
    keys = ("$id", "id") if is_old else ("$id",)
    return any(isinstance(part.get(key), str) for part in inner for key in keys)


def _longest_way(inner: dict[str, dict[str, int]], own: dict[str, int]) -> int:
    """The longest path down from the root. `inner` has the references in each target with their
    levels, `own` the deepest level of each. Through a circle, a path may take every member."""
    heights: dict[str, int] = {}
    for circle in _circles(inner):
        through, below = 0, 0
        for name in circle:
            levels = inner[name].items()
            through += max((level for each, level in levels if each in circle), default=0)
            ends = (level + heights[each] for each, level in levels if each not in circle)
            below = max(below, own[name], max(ends, default=0))
        heights.update(dict.fromkeys(circle, through + below))
    return heights[_ROOT]


def _circles(inner: dict[str, dict[str, int]]) -> list[set[str]]:
    """The sets of references that lead to each other, each after the sets that it leads to
    (Kosaraju's algorithm)."""
    finished: dict[str, None] = {}
    entered = {_ROOT}
    way = [(_ROOT, iter(inner[_ROOT]))]
    while way:
        name, rest = way[-1]
        child = next((each for each in rest if each not in entered), None)
        if child is None:
            finished[name] = None
            way.pop()
        else:
            entered.add(child)
            way.append((child, iter(inner[child])))
    outer: dict[str, list[str]] = {name: [] for name in finished}
    for name in finished:
        for each in inner[name]:
            outer[each].append(name)
    circles, waiting = [], dict(finished)
    while waiting:
        last, _ = waiting.popitem()
        circle, found = {last}, [last]
        while found:
            for each in outer[found.pop()]:
                if each in waiting:
                    del waiting[each]
                    circle.add(each)
                    found.append(each)
        circles.append(circle)
    return circles[::-1]


def _parts(schema: Any) -> Iterator[tuple[Any, int]]:
    """Every object and list of a schema, with its level."""
    waiting = [(schema, 0)]
    while waiting:
        part, level = waiting.pop()
        yield part, level
        inner = part.values() if isinstance(part, dict) else part
        if isinstance(part, dict | list):
            waiting.extend((each, level + 1) for each in inner if isinstance(each, dict | list))


class _Search:
    """`ending`: the references that are known to end."""

    def __init__(self, ending: set[str]) -> None:
        self.ending = ending
        self._visits = 0

    def ends(self, schema: Any) -> bool:
        """Whether a finite value may follow a schema, by the references that are known to end."""
        self._visits += 1
        if self._visits > MAX_VISITS:
            raise _TooMuch
        if not isinstance(schema, dict):
            return schema is not False
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in self.ending:
            return False
        if not all(self.ends(each) for each in list_of(schema, "allOf")):
            return False
        for key in ("anyOf", "oneOf"):
            branches = list_of(schema, key)
            if branches and not any(self.ends(each) for each in branches):
                return False
        if "enum" in schema or "const" in schema:
            return True
        types = schema.get("type")
        types = [types] if isinstance(types, str) else types
        if not isinstance(types, list) or _SCALARS & {str(each) for each in types}:
            return True
        is_object = "object" in types and self._object_ends(schema)
        return is_object or ("array" in types and self._array_ends(schema))

    def _object_ends(self, schema: dict[str, Any]) -> bool:
        properties = schema.get("properties")
        known = properties if isinstance(properties, dict) else {}
        needed = [name for name in list_of(schema, "required") if isinstance(name, str)]
        return all(self.ends(known.get(name, True)) for name in needed)

    def _array_ends(self, schema: dict[str, Any]) -> bool:
        least = schema.get("minItems")
        if not isinstance(least, int) or least < 1:
            return True
        first = list_of(schema, "prefixItems")[:least]
        rest = schema.get("items", True) if len(first) < least else True
        return all(self.ends(each) for each in (*first, rest))


def list_of(schema: dict[str, Any], key: str) -> list[Any]:
    """The list under a key; empty if there is none."""
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _references(schema: Any) -> Iterator[str]:
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            reference = part.get("$ref")
            if isinstance(reference, str):
                yield reference
            waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)


def target_of(root: Any, reference: str) -> Any:
    """The target of a reference within the schema; `UNKNOWN` for other references."""
    if reference != "#" and not reference.startswith("#/"):
        return UNKNOWN
    place = root
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(place, dict) and name in place:
            place = place[name]
        elif isinstance(place, list) and name.isdecimal() and int(name) < len(place):
            place = place[int(name)]
        else:
            return UNKNOWN
    return place
