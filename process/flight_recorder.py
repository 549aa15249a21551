"""A process's flight recorder: its last events in a ring, read on request.

Recording an event puts one tuple into a ring; nothing is formatted, sent or written. One thread
records and reads. The ring holds `CAPACITY` events: minutes of a busy worker, about 10 MB.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice

from protocol.flight import FlightEvent, FlightKind

CAPACITY = 65_536
PAGE = 2_048
"""Events examined for one answer: about 2 ms of the recording thread."""
Attempt = tuple[str, int] | tuple[str, int, int]
"""A request's id and the attempt's number; a third member is ignored."""
NOBODY: Attempt = ("", 0)
"""The attempt of an event that concerns no request."""
_LONGEST_TEXT = 200

_KINDS = {each.value: each for each in FlightKind}
_Record = tuple[float, float, str, str, int, int, int, str]
"""The stored form of an event. It has plain values only, so that the garbage collector stops
tracking it; `_value_` is the quick way to a member's value."""


class FlightRecorder:
    """The last events. `clock` returns seconds of the monotonic clock, `wall_us` microseconds of
    the Unix epoch."""

    def __init__(
        self, clock: Callable[[], float], wall_us: Callable[[], int], capacity: int = CAPACITY
    ) -> None:
        self._clock = clock
        self._wall_us = wall_us
        self._ring: deque[_Record] = deque(maxlen=capacity)
        self._num_recorded = 0

    def note(
        self,
        kind: FlightKind,
        attempt: Attempt = NOBODY,
        number: int = 0,
        tokens: int = 0,
        text: str = "",
        since: float | None = None,
    ) -> None:
        """Record an event that happened now, or lasted from `since` (by the clock) until now."""
        now = self._clock()
        started = now if since is None else since
        name, attempt_number = attempt[0], attempt[1]
        record = (started, now, kind._value_, name, attempt_number, number, tokens, text)
        self._ring.append(record)
        self._num_recorded += 1

    def note_span(
        self,
        started: float,
        ended: float,
        kind: FlightKind,
        attempt: Attempt = NOBODY,
        number: int = 0,
        tokens: int = 0,
    ) -> None:
        """Record an event that lasted from `started` to `ended`, by the clock."""
        name, attempt_number = attempt[0], attempt[1]
        record = (started, ended, kind._value_, name, attempt_number, number, tokens, "")
        self._ring.append(record)
        self._num_recorded += 1

    def page(
        self, after: int = 0, request_id: str = "", since_us: int = 0, until_us: int = 0
    ) -> tuple[list[FlightEvent], int]:
        """Events of the ring in the order of recording, and the place to continue `after`; 0 if
        there are no more.

        Each call examines `PAGE` events. It leaves out events that ended before `since_us` or began
        after `until_us` (unless 0). With a `request_id` it also leaves out the events of other
        requests.
        """
        first = self._num_recorded - len(self._ring)
        skipped = max(0, after - first)
        records = list(islice(self._ring, skipped, skipped + PAGE))
        offset_us = self._wall_us() - self._clock() * 1e6
        found = []
        for started, ended, kind, name, attempt, number, tokens, text in records:
            if request_id and name and name != request_id:
                continue
            start_us, end_us = round(started * 1e6 + offset_us), round(ended * 1e6 + offset_us)
            if end_us < since_us or (until_us and start_us > until_us):
                continue
            found.append(
                FlightEvent(
                    start_us,
                    max(0, end_us - start_us),
                    _KINDS[kind],
                    name,
                    attempt,
                    number,
                    tokens,
                    text[:_LONGEST_TEXT],
                )
            )
        reached = first + skipped + len(records)
        return found, reached if reached < self._num_recorded else 0
