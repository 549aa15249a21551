"""Approximate quantiles of a stream of values. A sketch takes little memory, and sketches can be
merged.

Logarithmic buckets, as in DDSketch (Masson et al., VLDB 2019): each bucket is `GAMMA` times as
wide as the one below, so that a quantile is within 1 % of a value that was observed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, log

GAMMA = 1.02
_PER_LOG = 1 / log(GAMMA)
MOST_BUCKET = 2000
"""The last bucket, which holds 10^17; larger values count there."""
_SMALLEST = 1e-3
_SMALLEST_BUCKET = ceil(log(_SMALLEST) * _PER_LOG)


class Sketch:
    """Counts of values by bucket; values below 0.001 count as 0.001."""

    def __init__(self, buckets: Mapping[int, int] | None = None) -> None:
        self.buckets: dict[int, int] = dict(buckets or {})
        self.count = sum(self.buckets.values())

    def add(self, values: Sequence[float]) -> None:
        """Observe values."""
        buckets = self.buckets
        for value in values:
            bucket = ceil(log(value) * _PER_LOG) if value > _SMALLEST else _SMALLEST_BUCKET
            buckets[bucket] = buckets.get(bucket, 0) + 1
        self.count += len(values)

    def merge(self, other: Sketch) -> None:
        """Add another sketch's values."""
        for bucket, count in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + count
        self.count += other.count

    def quantile(self, q: float) -> float | None:
        """The value below which a share `q` of all values lies; None without values."""
        if not self.count:
            return None
        rank = q * (self.count - 1)
        seen = 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen > rank:
                return 2 * GAMMA**bucket / (1 + GAMMA)
        raise AssertionError("every value is in a bucket")


def merged(sketches: Iterable[Sketch]) -> Sketch:
    """A new sketch of all values."""
    whole = Sketch()
    for each in sketches:
        whole.merge(each)
    return whole
