"""Climbs from a fleet's settings to better settings, and says how sure their gain is. Pure.

Half of a trace's parts, every other one, chooses the settings; only the other half says what they
gain. So the gain is not that of the luckiest of many. Parts are compared in pairs: the same
requests with the settings as they are and with other ones. In traces whose turns wait for earlier
answers, the arrivals change their order, so parts have nearly the same requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist

import msgspec

Values = Mapping[str, float]
"""The settings of a fleet, by name."""
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Knob:
    """A setting that may change: by `factor` at a time, within its bounds."""

    name: str
    factor: float
    least: float
    most: float

    def beside(self, value: float) -> list[float]:
        """The next values below and above this one."""
        found = (value / self.factor, value * self.factor)
        return [each for each in found if self.least <= each <= self.most]


class Served(msgspec.Struct, frozen=True):
    """A simulated trace: requests and good ones in each of its parts, and latencies over all."""

    requests: list[int]
    good: list[int]
    ttft_p99_ms: float = 0.0
    tpot_p99_ms: float = 0.0

    @property
    def good_share(self) -> float:
        """The good share of all requests."""
        return sum(self.good) / max(1, sum(self.requests))

    @property
    def choosing(self) -> int:
        """The good requests of the parts that choose."""
        return sum(self.good[::2])


@dataclass(frozen=True)
class Gain:
    """By how much the share of good requests grows, in the parts that did not choose, and the
    interval in which that lies in 95 of 100 cases."""

    share: float
    low: float
    high: float

    @property
    def is_sure(self) -> bool:
        """Whether the gain is more than chance."""
        return self.low > 0


@dataclass(frozen=True)
class Tried:
    """Settings, and how they served the trace."""

    values: Values
    served: Served


Tries = Callable[[Sequence[Values]], Sequence[Served]]
"""Simulates a trace with each of these settings."""


def climb(start: Values, knobs: Sequence[Knob], tries: Tries, rounds: int) -> list[Tried]:
    """Everything that was tried, the settings as they are first. Each round tries all neighbours of
    the best settings so far, and the best of these are next."""
    (served,) = tries([start])
    best = Tried(start, served)
    found = [best]
    for _ in range(rounds):
        known = [each.values for each in found]
        beside = [
            {**best.values, knob.name: value}
            for knob in knobs
            for value in knob.beside(best.values[knob.name])
        ]
        new = [each for each in beside if each not in known]
        found += [Tried(*each) for each in zip(new, tries(new), strict=True)]
        better = best_of(found)
        if better is best:
            break
        best = better
    return found


def best_of(tried: Sequence[Tried]) -> Tried:
    """The settings with the most good requests in the parts that choose; of equal ones those that
    were tried first."""
    return max(tried, key=lambda each: each.served.choosing)


def gain(base: Served, other: Served) -> Gain:
    """The gain of other settings over those as they are, by the parts that did not choose."""
    counts = base.requests[1::2]
    more = [new - old for old, new in zip(base.good[1::2], other.good[1::2], strict=True)]
    total, parts = max(1, sum(counts)), len(counts)
    share = sum(more) / total
    if parts < 2:
        return Gain(share, -1.0, 1.0)
    squares = [(each - share * count) ** 2 for each, count in zip(more, counts, strict=True)]
    error = sqrt(sum(squares) * parts / (parts - 1)) / total
    width = _students_t(parts - 1) * error
    return Gain(share, share - width, share + width)


def _students_t(freedom: int) -> float:
    """The quantile of Student's t for a two-sided interval, by the expansion of Cornish and
    Fisher; within 2 % from 4 degrees of freedom on, and too small below."""
    z = NormalDist().inv_cdf((1 + _CONFIDENCE) / 2)
    first = (z**3 + z) / (4 * freedom)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return z + first + second
