"""The changes of a summary since a reader last saw it; pure.

A summary is a JSON object. Its parts (top-level values) are sent when they have changed. The part
`workers` is compared worker by worker and field by field, because each busy worker changes some
fields every second and most fields never. `merged` defines how a reader applies the changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WORKERS = "workers"
ORDER = "worker_ids"
_ID = "worker_id"

_Versioned = dict[str, tuple[int, Any]]


class Versions:
    """The latest summary, with the number of the summary in which each value last changed."""

    def __init__(self) -> None:
        self._parts: _Versioned = {}
        self._workers: dict[str, _Versioned] | None = None
        self._fields: dict[str, None] = {}  # of all workers so far, in order

    def update(self, number: int, summary: Mapping[str, Any]) -> None:
        """Take summary `number`; numbers grow. A removed part or field becomes None.

        A worker may leave and come back with fewer fields between two reads, so every worker gets
        every field that any worker ever had.
        """
        parts = dict(summary)
        workers = parts.pop(WORKERS, None)
        if workers is not None:
            former = self._workers or {}
            self._fields.update(dict.fromkeys(name for each in workers for name in each))
            self._workers = {
                each[_ID]: _updated(former.get(each[_ID], {}), number, {**self._fields, **each})
                for each in workers
            }
            parts[ORDER] = list(self._workers)
        self._parts = _updated(self._parts, number, parts)

    def since(self, number: int) -> dict[str, Any]:
        """The values that changed after summary `number`; 0: all of them.

        Each changed worker has its id and its changed fields. `worker_ids` lists all workers in
        order, if one came, left or moved.
        """
        changed = _newer(self._parts, number)
        if self._workers is not None:
            changed[WORKERS] = [
                {_ID: worker_id, **fields}
                for worker_id, known in self._workers.items()
                if (fields := _newer(known, number))
            ]
        return changed


def merged(known: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """A reader's summary after `changed`, which `Versions.since` made for what it knew."""
    result = {**known, **changed}
    if WORKERS in changed:
        workers = {each[_ID]: each for each in known.get(WORKERS, ())}
        for each in changed[WORKERS]:
            workers[each[_ID]] = {**workers.get(each[_ID], {}), **each}
        result[WORKERS] = [workers[worker_id] for worker_id in result[ORDER]]
    return result


def _updated(known: _Versioned, number: int, values: Mapping[str, Any]) -> _Versioned:
    gone = dict.fromkeys(known.keys() - values.keys())
    return {
        name: known[name] if name in known and known[name][1] == value else (number, value)
        for name, value in {**gone, **values}.items()
    }


def _newer(values: _Versioned, number: int) -> dict[str, Any]:
    return {name: value for name, (at, value) in values.items() if at > number}
