"""Watches whether some prefill worker can send us KV blocks, so that their loss is not silent.

Without one, this decode worker computes whole prompts itself, and every other request slows down.
The condition begins when none has been reachable for a while, and ends when one is. A fleet that
has never had a prefill worker needs none, unless prefill is required. Belongs to the loop's thread;
other threads may read `is_lost` and ask `not_ready_reason`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

log = logging.getLogger(__name__)

_UPDATE_PERIOD_S = 0.5
_MOST_NAMED = 3

Obstacles = Callable[[float], Mapping[str, str | None]]
"""For each prefill worker in the fleet, by id: the reason why it cannot send to us, or None if it
can."""


class PrefillReach:
    """Lost prefill workers are reported once none has been reachable for `after_s` seconds.

    `report(is_lost, text)` is called when they are lost, when one is reachable again, and when the
    first one is reached after the start. While they are lost, `retry_closed` is called every
    `after_s` seconds to retry connections that were given up.
    """

    def __init__(
        self,
        obstacles: Obstacles,
        retry_closed: Callable[[], None],
        after_s: float,
        is_required: bool,
        report: Callable[[bool, str], None],
    ) -> None:
        self.is_lost = False
        self._obstacles = obstacles
        self._retry_closed = retry_closed
        self._after_s = after_s
        self._is_required = self._is_expected = is_required
        self._report = report
        self._has_reached = False
        self._next_update = 0.0
        self._unreached_since: float | None = None
        self._reason = "no prefill worker has been reached yet"

    def update(self, now: float) -> None:
        """Call it every turn with monotonic time. It does nothing most of the time."""
        if now < self._next_update:
            return
        self._next_update = now + _UPDATE_PERIOD_S
        obstacles = self._obstacles(now)
        self._is_expected |= bool(obstacles)
        reached = [name for name, obstacle in obstacles.items() if obstacle is None]
        if reached:
            self._note_reached(reached)
        elif self._is_expected:
            self._note_unreached(now, obstacles)

    def not_ready_reason(self) -> str | None:
        """Why the worker is not ready: prefill is required, and none was reached since the start,
        or all are lost. None if it is ready."""
        if not self._is_required or (self._has_reached and not self.is_lost):
            return None
        return self._reason

    def _note_reached(self, names: list[str]) -> None:
        is_first, self._has_reached, self._unreached_since = not self._has_reached, True, None
        if is_first and not self.is_lost:
            self._report(False, f"prefill workers can be reached: {_listed(names)}")
        if self.is_lost:
            self.is_lost = False
            text = f"prefill workers can be reached again: {_listed(names)}"
            log.warning("%s", text)
            self._report(False, text)

    def _note_unreached(self, now: float, obstacles: Mapping[str, str | None]) -> None:
        if self._unreached_since is None:
            self._unreached_since = now
        if now - self._unreached_since < self._after_s:
            return
        self._unreached_since = now
        self._reason = _words(obstacles)
        self._retry_closed()
        if not self.is_lost:
            self.is_lost = True
            text = f"{self._reason}; prompts are computed here"
            log.error("%s", text)
            self._report(True, text)


def _words(obstacles: Mapping[str, str | None]) -> str:
    if not obstacles:
        return "no prefill worker is registered"
    named = _listed([f"{name}: {obstacle}" for name, obstacle in sorted(obstacles.items())], "; ")
    return f"none of {len(obstacles)} prefill workers can be reached: {named}"


def _listed(texts: list[str], separator: str = ", ") -> str:
    more = len(texts) - _MOST_NAMED
    return separator.join(texts[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
