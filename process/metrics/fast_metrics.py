"""Metrics that every token or request updates, on one thread: plain numbers, exported in
Prometheus's format.

The library's own metrics take a lock and several calls each, a sixth of a streamed token's cost.
Histograms put values aside. They find the buckets of these values when they are read, or when many
values wait: sorting a thousand values costs less than searching the bounds a thousand times.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, repeat
from operator import itemgetter

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

MAX_ASIDE = 1024
"""The most values that a histogram puts aside."""


class TokenCounter(Collector):
    """A counter; callers add to `value` directly. `more` returns an additional count."""

    def __init__(
        self,
        name: str,
        text: str,
        registry: CollectorRegistry,
        more: Callable[[], int] = lambda: 0,
    ) -> None:
        self.value = 0
        self._more = more
        self._name = name
        self._text = text
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """See the library's `Collector`."""
        yield CounterMetricFamily(self._name, self._text, value=self.value + self._more())


class LabelledCounts(Collector):
    """A counter with one label. All `values` are shown as 0 from the start, because Prometheus sees
    no increase in a series that begins with its first event."""

    def __init__(
        self, name: str, text: str, label: str, values: Iterable[str], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._text = text
        self._label = label
        self._values = dict.fromkeys(values, 0)
        registry.register(self)

    def add(self, value: str, count: int = 1) -> None:
        """Count an event with this label value."""
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
    together. `phases` has the name and the help text of each by its key. Values are put aside as in
    `TokenHistogram`."""

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
        self._aside: dict[str, list[float]] = {key: [] for key in phases}
        registry.register(self)

    def observe(self, durations_ms: Sequence[Mapping[str, float | None]]) -> None:
        """Observe many requests. A phase's value is None if it did not happen."""
        for key, aside in self._aside.items():
            values = map(itemgetter(key), durations_ms)
            aside += [each for each in values if each is not None]
            if len(aside) >= MAX_ASIDE:
                self._sort_in(key)

    def _sort_in(self, key: str) -> None:
        """Find the buckets of a phase's values that were put aside."""
        values = self._aside[key]
        self._sums_ms[key] += sum(values)
        count_by_bucket(values, self._bounds_ms, self._counts[key])
        values.clear()

    def collect(self) -> Iterable[Metric]:
        """See the library's `Collector`."""
        for key, (name, text) in self._phases.items():
            self._sort_in(key)
            total_s = self._sums_ms[key] / 1000
            shown = buckets(self._bounds, self._counts[key])
            yield HistogramMetricFamily(name, text, buckets=shown, sum_value=total_s)


class TokenHistogram(Collector):
    """A histogram with these upper bounds and a last bucket up to infinity. Callers for whom
    `observe` is too slow append values to `aside`, and call `sort_in` when it is long."""

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self.aside: list[float] = []
        registry.register(self)

    @property
    def count(self) -> int:
        """Number of observed values."""
        return sum(self._counts) + len(self.aside)

    def observe(self, value: float, count: int = 1) -> None:
        """Observe the same value `count` times."""
        self.aside.extend(repeat(value, count))
        if len(self.aside) >= MAX_ASIDE:
            self.sort_in()

    def sort_in(self) -> None:
        """Find the buckets of the values put aside."""
        self._sum += sum(self.aside)
        count_by_bucket(self.aside, self._bounds, self._counts)
        self.aside.clear()

    def collect(self) -> Iterable[Metric]:
        """See the library's `Collector`."""
        self.sort_in()
        shown = buckets(self._bounds, self._counts)
        yield HistogramMetricFamily(self._name, self._text, buckets=shown, sum_value=self._sum)


def count_by_bucket(values: list[float], bounds: Sequence[float], counts: list[int]) -> None:
    """Sort the values, and add the number of those in each bucket to `counts`."""
    values.sort()
    begin = 0
    for place, bound in enumerate(bounds):
        end = bisect_right(values, bound, begin)
        counts[place] += end - begin
        begin = end
    counts[-1] += len(values) - begin


def buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """A histogram's buckets in the library's form: labels of the upper bounds, the last of them
    infinite, with the sums of `counts` up to each."""
    names = map(_bound, (*bounds, float("inf")))
    return list(zip(names, map(float, accumulate(counts)), strict=True))


def _bound(value: float) -> str:
    """A bucket's label."""
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text
