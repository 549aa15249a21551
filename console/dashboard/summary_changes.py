"""The changes of a summary since a reader last saw it; pure.

A summary is a JSON object. Its parts (top-level values) are sent when they have changed. The parts
of `LISTS` are compared entry by entry and field by field, because each busy worker or pair changes
some fields every second and most fields never. `merged` defines how a reader applies the changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class _List(NamedTuple):
    """The field that identifies the entries of a list, and the part that holds their order."""

    id: str
    order: str


LISTS = {"workers": _List("worker_id", "worker_ids"), "pairs": _List("pair_id", "pair_ids")}

_Versioned = dict[str, tuple[int, Any]]


class Versions:
    """The latest summary, with the number of the summary in which each value last changed."""

    def __init__(self) -> None:
        self._parts: _Versioned = {}
        self._lists: dict[str, dict[str, _Versioned]] = {}
        self._fields: dict[str, dict[str, None]] = {name: {} for name in LISTS}
        """The fields of all entries so far, in order."""

    def update(self, number: int, summary: Mapping[str, Any]) -> None:
        """Take summary `number`; numbers grow. A removed part or field becomes None.

        An entry may leave its list and come back with fewer fields between two reads, so every
        entry gets every field that any entry ever had.
        """
        parts = dict(summary)
        for name, (key, order) in LISTS.items():
            if name not in parts:
                continue
            entries, former, fields = parts.pop(name), self._lists.get(name, {}), self._fields[name]
            fields.update(dict.fromkeys(field for each in entries for field in each))
            self._lists[name] = {
                each[key]: _updated(former.get(each[key], {}), number, {**fields, **each})
                for each in entries
            }
            parts[order] = list(self._lists[name])
        self._parts = _updated(self._parts, number, parts)

    def since(self, number: int) -> dict[str, Any]:
        """The values that changed after summary `number`; 0: all of them.

        Each changed entry of a list has its id and its changed fields. The part with a list's order
        is included if an entry came, left or moved; it has all ids.
        """
        changed = _newer(self._parts, number)
        for name, entries in self._lists.items():
            newer = ((each, _newer(fields, number)) for each, fields in entries.items())
            changed[name] = [{LISTS[name].id: each, **fields} for each, fields in newer if fields]
        return changed


def merged(known: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """A reader's summary after it has applied `changed`, which `Versions.since` returned."""
    result = {**known, **changed}
    for name, (key, order) in LISTS.items():
        if name not in changed:
            continue
        entries = {each[key]: each for each in known.get(name, ())}
        for each in changed[name]:
            entries[each[key]] = {**entries.get(each[key], {}), **each}
        result[name] = [entries[each] for each in result[order]]
    return result


def _updated(known: _Versioned, number: int, values: Mapping[str, Any]) -> _Versioned:
    removed = dict.fromkeys(known.keys() - values.keys())
    return {
        name: known[name] if name in known and known[name][1] == value else (number, value)
        for name, value in {**removed, **values}.items()
    }


def _newer(values: _Versioned, number: int) -> dict[str, Any]:
    return {name: value for name, (at, value) in values.items() if at > number}
