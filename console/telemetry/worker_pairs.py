"""Pairs of workers between which KV moves: bytes, rates, exposed times, paths, failures.

Owns the sums of the last minute by pair, made from the traces of finished handoffs. That minute is
also the one of the fleet's totals, so that the pairs add up to the totals. A pair that moved
nothing for an hour is forgotten. The clock is passed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from console.telemetry.kv_paths import is_below_way
from console.telemetry.quantile_sketch import Sketch, merged
from console.telemetry.request_window import MINUTE_US, SLOT_US, last_minute
from protocol.traces import PrefillTrace, WriteSpan

KEPT_US = 3_600_000_000
MAX_PAIRS = 4096

PairKey = tuple[str, str]
"""The worker that sends, the worker that receives."""


class PairPaths(NamedTuple):
    """The path of a pair's KV, the path that it should take, and the workers of the two that forbid
    the second path."""

    measured: str
    expected: str | None
    narrowed: tuple[str, ...] = ()


class PairTotals(NamedTuple):
    """The sums of one pair since it was first seen; transfers and their exposed parts in
    seconds."""

    bytes_moved: int
    blocks: int
    descriptors: int
    busy_s: float
    exposed_s: float
    failures: int


@dataclass
class _Slot:
    start_us: int
    bytes_moved: int = 0
    blocks: int = 0
    writes: int = 0
    busy_us: int = 0
    exposed: Sketch = field(default_factory=Sketch)


@dataclass
class _Pair:
    """One pair; its totals count since it was first seen."""

    seen_us: int
    failures: int = 0
    bytes_moved: int = 0
    blocks: int = 0
    writes: int = 0
    busy_us: int = 0
    exposed_us: int = 0
    slots: deque[_Slot] = field(default_factory=deque)


class PairTable:
    """All pairs used by one router's requests."""

    def __init__(self, wall_us: Callable[[], int]) -> None:
        self._wall_us = wall_us
        self._since_us = wall_us()
        self._pairs: dict[PairKey, _Pair] = {}

    def moved(self, target: str, trace: PrefillTrace) -> None:
        """Note a closed handoff whose blocks moved to `target`."""
        now_us = self._wall_us()
        pair = self._pair((trace.worker_id, target), now_us)
        if not pair.slots or now_us >= pair.slots[-1].start_us + SLOT_US:
            pair.slots.append(_Slot(now_us - now_us % SLOT_US))
            while pair.slots[0].start_us < now_us - MINUTE_US - SLOT_US:
                pair.slots.popleft()
        busy, exposed = busy_us(trace.writes), exposed_us(trace)
        for sums in (pair, pair.slots[-1]):
            sums.bytes_moved += trace.bytes_moved
            sums.blocks += trace.blocks_moved
            sums.writes += len(trace.writes)
            sums.busy_us += busy
        if exposed is not None:
            pair.exposed_us += exposed
            pair.slots[-1].exposed.add([exposed / 1000])

    def failed(self, source: str, target: str) -> None:
        """Note an attempt over this pair that failed before its blocks had moved."""
        self._pair((source, target), self._wall_us()).failures += 1

    def totals(self) -> Iterator[tuple[PairKey, PairTotals]]:
        """The totals of every pair, for counters."""
        for key, pair in self._pairs.items():
            yield (
                key,
                PairTotals(
                    pair.bytes_moved, pair.blocks, pair.writes, pair.busy_us / 1e6,
                    pair.exposed_us / 1e6, pair.failures,
                ),
            )  # fmt: skip

    def as_json(self, paths: Callable[[PairKey], PairPaths]) -> list[dict[str, Any]]:
        """The pairs as `/fleet` shows them; `paths` returns the path of a pair."""
        now_us = self._wall_us()
        self._pairs = {
            key: pair for key, pair in self._pairs.items() if pair.seen_us > now_us - KEPT_US
        }
        minute = last_minute(now_us, self._since_us)
        return [
            _pair_json(key, self._pairs[key], minute, paths(key)) for key in sorted(self._pairs)
        ]

    def _pair(self, key: PairKey, now_us: int) -> _Pair:
        pair = self._pairs.get(key)
        if pair is None:
            if len(self._pairs) >= MAX_PAIRS:
                del self._pairs[min(self._pairs, key=lambda each: self._pairs[each].seen_us)]
            pair = self._pairs[key] = _Pair(now_us)
        pair.seen_us = now_us
        return pair


def busy_us(writes: Sequence[WriteSpan]) -> int:
    """The time during which at least one of the writes was under way."""
    total = end = 0
    for write in sorted(writes, key=lambda each: each.post_us):
        total += max(0, write.done_us - max(write.post_us, end))
        end = max(end, write.done_us)
    return total


def exposed_us(trace: PrefillTrace) -> int | None:
    """How long blocks still moved after the end of the last chunk; None without a write."""
    if not trace.writes:
        return None
    last_end = trace.chunks[-1].end_us if trace.chunks else trace.scheduled_us
    return max(0, max(each.done_us for each in trace.writes) - last_end)


def _pair_json(
    key: PairKey, pair: _Pair, minute: tuple[int, float], paths: PairPaths
) -> dict[str, Any]:
    begin_us, seconds = minute
    slots: Iterable[_Slot] = [each for each in pair.slots if each.start_us >= begin_us]
    moved = sum(each.bytes_moved for each in slots)
    busy = sum(each.busy_us for each in slots)
    writes = sum(each.writes for each in slots)
    busy_rate = moved / busy * 1e6 if busy else None
    return {
        "prefill": key[0],
        "decode": key[1],
        "path": paths.measured,
        "expected_path": paths.expected,
        "narrowed": list(paths.narrowed),
        "bytes_per_s": moved / seconds,
        "busy_bytes_per_s": busy_rate,
        "is_below_way": is_below_way(paths.expected, busy_rate, moved / writes if writes else 0.0),
        "blocks_per_s": sum(each.blocks for each in slots) / seconds,
        "writes_per_s": writes / seconds,
        "exposed_p95_ms": merged(each.exposed for each in slots).quantile(0.95),
        "failures": pair.failures,
    }
