"""Ended requests over time: the last minute as a whole, the last hour in steps of `POINT_US`.

Owns the counts. A request adds to the slot in which it ends. Slots of the last minute are summed on
reading; each history point is made once, when its time is over. The clock is passed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from console.telemetry.quantile_sketch import Sketch, merged

SLOT_US = 5_000_000
MINUTE_US = 60_000_000
POINT_US = 30_000_000
NUM_POINTS = 120
"""Enough for one hour."""


@dataclass
class Slot:
    """The requests that ended in one slot, which begins at `start_us`."""

    start_us: int
    num_ended: int = 0
    num_counted: int = 0
    num_good: int = 0
    output_tokens: int = 0
    bytes_moved: int = 0
    ttft: Sketch = field(default_factory=Sketch)
    tpot: Sketch = field(default_factory=Sketch)
    queue: Sketch = field(default_factory=Sketch)

    def add(
        self,
        goods: Sequence[bool | None],
        durations: Sequence[Mapping[str, float | None]],
        output_tokens: int,
    ) -> None:
        """Count requests: for each, whether it is good (None: it does not count for goodput) and
        its durations; for all together, their output tokens."""
        counted = [each for each in goods if each is not None]
        self.num_ended += len(goods)
        self.num_counted += len(counted)
        self.num_good += sum(counted)
        self.output_tokens += output_tokens
        self.ttft.add(_known("ttft_ms", durations))
        self.tpot.add(_known("tpot_ms", durations))
        self.queue.add(_known("queue_ms", durations))

    def plus(self, other: Slot) -> Slot:
        """The sum of two slots."""
        return _summed([self, other])

    @property
    def goodput(self) -> float | None:
        """The share of good requests; None if no request counts."""
        return self.num_good / self.num_counted if self.num_counted else None


class RequestWindow:
    """The slots of the last minute and the points of the last hour."""

    def __init__(self, wall_us: Callable[[], int]) -> None:
        self._wall_us = wall_us
        self._since_us = wall_us()
        now_us = self._since_us
        self._slots: deque[Slot] = deque([Slot(now_us - now_us % SLOT_US)])
        self._points: deque[Slot] = deque(maxlen=NUM_POINTS)
        self._point_us = now_us - now_us % POINT_US

    def now(self) -> Slot:
        """The current slot, to which ended requests are added. Closes the points that are over, and
        drops old slots."""
        now_us = self._wall_us()
        last = self._slots[-1]
        if now_us < last.start_us + SLOT_US:
            return last
        self._close_points(now_us)
        while self._slots and self._slots[0].start_us < now_us - MINUTE_US - POINT_US:
            self._slots.popleft()
        self._slots.append(Slot(now_us - now_us % SLOT_US))
        return self._slots[-1]

    def add_bytes(self, count: int) -> None:
        """Count bytes of KV that moved."""
        self.now().bytes_moved += count

    def minute(self) -> tuple[Slot, float]:
        """The last minute as one slot, and its length in seconds."""
        self.now()
        begin_us, seconds = last_minute(self._wall_us(), self._since_us)
        return _summed(each for each in self._slots if each.start_us >= begin_us), seconds

    def points(self) -> list[Slot]:
        """The points of the last hour, oldest first, including those without requests."""
        self.now()
        return list(self._points)

    def _close_points(self, now_us: int) -> None:
        oldest = now_us - now_us % POINT_US - NUM_POINTS * POINT_US
        self._point_us = max(self._point_us, oldest)
        while self._point_us + POINT_US <= now_us:
            end_us = self._point_us + POINT_US
            slots = [each for each in self._slots if self._point_us <= each.start_us < end_us]
            point = _summed(slots)
            point.start_us = self._point_us
            self._points.append(point)
            self._point_us = end_us


def last_minute(now_us: int, since_us: int) -> tuple[int, float]:
    """The start of the last minute, in whole slots, and its length in seconds up to now. The minute
    begins no earlier than `since_us`, the start of the counts."""
    begin_us = now_us - MINUTE_US
    begin_us += SLOT_US - begin_us % SLOT_US
    return begin_us, max(1.0, (now_us - max(since_us, begin_us)) / 1e6)


def _known(key: str, durations: Sequence[Mapping[str, float | None]]) -> list[float]:
    return [ms for each in durations if (ms := each[key]) is not None]


def _summed(slots: Iterable[Slot]) -> Slot:
    parts = list(slots)
    return Slot(
        start_us=parts[0].start_us if parts else 0,
        num_ended=sum(each.num_ended for each in parts),
        num_counted=sum(each.num_counted for each in parts),
        num_good=sum(each.num_good for each in parts),
        output_tokens=sum(each.output_tokens for each in parts),
        bytes_moved=sum(each.bytes_moved for each in parts),
        ttft=merged(each.ttft for each in parts),
        tpot=merged(each.tpot for each in parts),
        queue=merged(each.queue for each in parts),
    )
