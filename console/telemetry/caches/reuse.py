"""The share of prompt blocks that a larger or smaller cache would have missed.

Reuse distances of a spatial sample of blocks, SHARDS with a fixed number of samples: Waldspurger et
al., Efficient MRC Construction with SHARDS, FAST 2015. A block's hash decides whether it is
sampled, so all uses of a block are sampled or none. The distance between two uses is the number of
distinct sampled blocks between them, divided by the sampling rate. Pure, and bounded in memory.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

MAX_TRACKED = 4096
MAX_PER_TICK = 512
"""With more sampled uses than this between two ticks, half of the samples are dropped."""
_DIGEST_BYTES = 3  # of a block's hash
_BITS = 8 * _DIGEST_BYTES
_HALF_LIFE = 200_000
"""Sampled uses after which a use counts half, so that the curve follows the traffic."""


class ReuseCurve:
    """Distances of the uses of prompt blocks. Feed it every prompt."""

    def __init__(self, max_tracked: int = MAX_TRACKED) -> None:
        self._max_tracked = max_tracked
        self._limit = 1 << _BITS  # hashes below it are sampled
        self._limit_digest = b"\xff" * 64  # the same limit, for comparing whole hashes
        self._last: dict[int, int] = {}  # sampled hash -> number of its last use
        self._largest: list[int] = []  # a heap of the sampled hashes, negated
        self._times: list[int] = []  # the numbers in `_last`, ascending
        self._histogram: dict[int, float] = {}
        self._misses = 0.0  # first uses
        self._num_uses = 0
        self._in_tick = 0

    @property
    def sample_rate(self) -> float:
        """The share of blocks that is sampled."""
        return self._limit / (1 << _BITS)

    def use(self, hashes: Iterable[bytes]) -> None:
        """Note that a prompt used these blocks."""
        limit = self._limit_digest
        for digest in [each for each in hashes if each < limit]:
            value = int.from_bytes(digest[:_DIGEST_BYTES], "big")
            if value < self._limit:
                self._use(value)
                if self._in_tick > MAX_PER_TICK:
                    self._halve_rate()

    def tick(self) -> None:
        """Call this once per second. It bounds the curve's cost under load, because the rate falls
        until the uses of a second are few enough."""
        self._in_tick = 0

    def miss_ratio(self, num_blocks: Sequence[int]) -> list[float | None]:
        """The share of uses that an LRU cache of `num_blocks` would have missed; None before the
        first use."""
        total = self._misses + sum(self._histogram.values())
        if not total:
            return [None] * len(num_blocks)
        ordered = sorted(self._histogram.items())
        ratios: list[float | None] = []
        for size in num_blocks:
            hits = sum(weight for distance, weight in ordered if distance < size)
            ratios.append(1 - hits / total)
        return ratios

    def _use(self, value: int) -> None:
        weight = (1 << _BITS) / self._limit
        before = self._last.get(value)
        if before is None:
            self._misses += weight
            heapq.heappush(self._largest, -value)
        else:
            num_later = len(self._times) - bisect_right(self._times, before)
            bucket = _bucket(round(num_later * weight))
            self._histogram[bucket] = self._histogram.get(bucket, 0.0) + weight
            self._forget(before)
        self._num_uses += 1
        self._last[value] = self._num_uses
        self._times.append(self._num_uses)
        if len(self._last) > self._max_tracked:
            self._lower_rate()
        self._in_tick += 1
        if self._num_uses % _HALF_LIFE == 0:
            self._misses /= 2
            self._histogram = {key: value / 2 for key, value in self._histogram.items()}

    def _lower_rate(self) -> None:
        """Drop the largest hash, and sample only smaller ones from now on."""
        self._limit = -heapq.heappop(self._largest)
        self._forget(self._last.pop(self._limit))
        self._limit_digest = self._limit.to_bytes(_DIGEST_BYTES, "big")

    def _halve_rate(self) -> None:
        """Sample half as many hashes from now on."""
        self._limit = max(1, self._limit // 2)
        self._limit_digest = self._limit.to_bytes(_DIGEST_BYTES, "big")
        self._in_tick = 0
        while self._largest and -self._largest[0] >= self._limit:
            self._forget(self._last.pop(-heapq.heappop(self._largest)))

    def _forget(self, number: int) -> None:
        """Drop the number of a use that is no longer its hash's last one. The list is short, so
        moving the later numbers costs little."""
        del self._times[bisect_left(self._times, number)]


def _bucket(distance: int) -> int:
    """The distance with its four leading bits, so that the histogram stays small."""
    shift = max(0, distance.bit_length() - 4)
    return distance >> shift << shift
