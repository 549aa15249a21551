"""Metrics that every token or request updates, on one thread: plain numbers, exported in
Prometheus's format.

The library's own metrics take a lock and several calls each, a sixth of a streamed token's cost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
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


class LabelledCounts(Collector):
    """A counter with one label. Its `values` are shown from the start, as 0: Prometheus sees no
    increase in a series that begins with its first event."""

    def __init__(
        self, name: str, text: str, label: str, values: Iterable[str], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._text = text
        self._label = label
        self._values = dict.fromkeys(values, 0)
        registry.register(self)

    def add(self, value: str, count: int = 1) -> None:
        """Count something with this label value."""
        try:
            self._values[value] += count
        except KeyError:
            self._values[value] = count

    def collect(self) -> Iterable[Metric]:
        """See the library's `Collector`."""
        family = CounterMetricFamily(self._name, self._text, labels=[self._label])
        for value, count in self._values.items():
            family.add_metric([value], count)
        yield family


class PhaseHistograms(Collector):
    """Histograms of the phases of requests, in seconds, with the same upper bounds; updated
    together. `phases` has the name and the text of each by its key."""

    def __init__(
        self,
        phases: Mapping[str, tuple[str, str]],
        bounds: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._phases = phases
        self._bounds = tuple(bounds)
        self._bounds_ms = [1000 * each for each in bounds]
        self._counts = {key: [0] * (len(bounds) + 1) for key in phases}
        self._sums_ms = dict.fromkeys(phases, 0.0)
        registry.register(self)

    def observe(self, durations_ms: Mapping[str, float | None]) -> None:
        """Observe every phase that happened; None for one that did not."""
        bounds, sums = self._bounds_ms, self._sums_ms
        for key, counts in self._counts.items():
            value = durations_ms[key]
            if value is not None:
                counts[bisect_left(bounds, value)] += 1
                sums[key] += value

    def collect(self) -> Iterable[Metric]:
        """See the library's `Collector`."""
        for key, (name, text) in self._phases.items():
            total_s = self._sums_ms[key] / 1000
            shown = buckets(self._bounds, self._counts[key])
            yield HistogramMetricFamily(name, text, buckets=shown, sum_value=total_s)


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
        shown = buckets(self._bounds, self._counts)
        yield HistogramMetricFamily(self._name, self._text, buckets=shown, sum_value=self._sum)


def buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """A histogram's buckets as the library wants them: labels of the upper bounds, the last of
    which is infinite, with the sums of `counts` up to each."""
    names = map(_bound, (*bounds, float("inf")))
    return list(zip(names, map(float, accumulate(counts)), strict=True))


def _bound(value: float) -> str:
    """A bucket's label."""
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text
