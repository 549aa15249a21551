"""The last changes made through this router, with key and result, and their lines in the log.

Each change is also a line of the router's log that begins with `event=control`, so that it outlives
the process.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

log = logging.getLogger(__name__)

KEPT = 200


@dataclass(frozen=True, slots=True)
class ControlEntry:
    """One change: `key` is the name of the admin key, `old` and `new` are values of a setting."""

    at_us: int
    key: str
    action: str
    result: str
    old: str | None = None
    new: str | None = None


class ControlLog:
    """The newest changes first."""

    def __init__(self, wall_us: Callable[[], int]) -> None:
        self._wall_us = wall_us
        self._entries: deque[ControlEntry] = deque(maxlen=KEPT)

    def note(
        self, key: str, action: str, result: str, old: object = None, new: object = None
    ) -> None:
        """Log one change, whether done or refused."""
        shown = [None if each is None else str(each) for each in (old, new)]
        entry = ControlEntry(self._wall_us(), key, action, result, *shown)
        self._entries.appendleft(entry)
        log.info(
            "event=control key=%r action=%r old=%r new=%r result=%r", key, action, *shown, result
        )

    def as_json(self) -> list[dict[str, Any]]:
        """The body of `GET /control/log`."""
        return [asdict(each) for each in self._entries]
