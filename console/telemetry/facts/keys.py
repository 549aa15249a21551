"""What clients get, by key: ended requests of the last minute, and those that wait now.

Owns the counts of ended requests by key; what happened at the door comes from `http_kit.door`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from console.doctor.facts import KeyFacts
from http_kit.door import Door
from router.requests.trace_store import TraceStore

SLOT_US = 5_000_000
MINUTE_US = 60_000_000
_LIMITED, _LEFT, _INVALID, _FAILED = 429, 499, 400, 500


class KeyWindow:
    """The ended requests of the last minute by key: how many there were, and how many met the
    targets (good ones)."""

    def __init__(self, wall_us: Callable[[], int]) -> None:
        self._wall_us = wall_us
        self._slots: deque[tuple[int, Counter[str], Counter[str]]] = deque()

    def add(self, results: Counter[tuple[str, bool]]) -> None:
        """Count requests that have just ended, by key and by whether they met the targets."""
        now_us = self._wall_us()
        if not self._slots or now_us >= self._slots[-1][0] + SLOT_US:
            self._slots.append((now_us, Counter(), Counter()))
            self._drop_old(now_us)
        _, ended, good = self._slots[-1]
        for (key, is_good), number in results.items():
            ended[key] += number
            good[key] += number * is_good

    def minute(self) -> tuple[Counter[str], Counter[str]]:
        """Ended and good requests by key."""
        self._drop_old(self._wall_us())
        all_ended: Counter[str] = Counter()
        all_good: Counter[str] = Counter()
        for _, ended, good in self._slots:
            all_ended.update(ended)
            all_good.update(good)
        return all_ended, all_good

    def _drop_old(self, now_us: int) -> None:
        while self._slots and self._slots[0][0] <= now_us - MINUTE_US:
            self._slots.popleft()


def key_facts(
    window: KeyWindow, door: Door, traces: TraceStore, ttft_target_ms: float
) -> tuple[KeyFacts, ...]:
    """The keys that sent something in the last minute or have requests that wait now, by name."""
    ended, good = window.minute()
    by_key: dict[str, Counter[str]] = {}
    for (key, status), number in door.minute().items():
        by_key.setdefault(key, Counter())[_kind(status)] += number
    waiting, late = _waiting(traces, ttft_target_ms)
    names = by_key.keys() | ended.keys() | waiting.keys()
    return tuple(
        KeyFacts(
            name=name,
            **by_key.get(name, Counter()),
            ended=ended[name],
            good=good[name],
            waiting=waiting[name],
            late=late[name],
        )
        for name in sorted(names)
    )


def _kind(status: int) -> str:
    if status == _LIMITED:
        return "limited"
    if status == _LEFT:
        return "left"
    if status >= _FAILED:
        return "refused"
    return "invalid" if status >= _INVALID else "accepted"


def _waiting(traces: TraceStore, ttft_target_ms: float) -> tuple[Counter[str], Counter[str]]:
    """Requests without a first token, and those of them that are late already, by key."""
    waiting: Counter[str] = Counter()
    late: Counter[str] = Counter()
    limit_us = traces.wall_us() - round(ttft_target_ms * 1000)
    for trace in traces.running():
        if not trace.first_token_received_us:
            waiting[trace.key] += 1
            late[trace.key] += trace.received_us < limit_us
    return waiting, late
