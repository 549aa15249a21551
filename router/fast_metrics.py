"""Metrics that every token or request updates, on one thread: plain numbers, exported in
Prometheus's format.

The library's own metrics take a lock and several calls each, a sixth of a streamed token's cost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class TokenCounter(Collector):
    """A counter; callers add to `value` directly."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self.value = 0
        self._name = name
        self._text = text
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """See the library's `Collector`."""
        yield CounterMetricFamily(self._name, self._text, value=self.value)


class CountersByLabel(dict[str, Counter]):
    """The library's counters for each value of one label, cached: a lookup there costs more than
    counting."""

    def __init__(self, parent: Counter) -> None:
        super().__init__()
        self._parent = parent

    def __missing__(self, label: str) -> Counter:
        child = self[label] = self._parent.labels(label)
        return child


class TokenHistogram(Collector):
    """A histogram with these upper bounds and a last bucket up to infinity."""

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, count: int = 1) -> None:
        """Observe the same value `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterable[Metric]:
        """See the library's `Collector`."""
        names = [_bound(each) for each in (*self._bounds, float("inf"))]
        buckets = list(zip(names, map(float, accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


def _bound(value: float) -> str:
    """A bucket's label."""
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text
