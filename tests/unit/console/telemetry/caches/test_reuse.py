"""The miss-ratio curve, against a cache that is simulated block by block."""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.telemetry.caches.reuse import MAX_PER_TICK, ReuseCurve


def digest(number: int) -> bytes:
    return hashlib.blake2b(str(number).encode(), digest_size=16).digest()


def simulated(uses: list[int], size: int) -> float:
    """The share of uses that an LRU cache of this size misses."""
    cache: OrderedDict[int, None] = OrderedDict()
    misses = 0
    for use in uses:
        misses += use not in cache
        cache[use] = None
        cache.move_to_end(use)
        if len(cache) > size:
            cache.popitem(last=False)
    return misses / len(uses)


@given(st.lists(st.integers(0, 14), min_size=1, max_size=200))
def test_small_caches_are_exact_while_every_block_is_tracked(uses: list[int]) -> None:
    curve = ReuseCurve()
    curve.use(map(digest, uses))
    assert curve.sample_rate == 1
    sizes = range(16)  # distances below 16 have buckets of their own
    assert curve.miss_ratio(list(sizes)) == pytest.approx([simulated(uses, n) for n in sizes])


def test_a_sample_gives_nearly_the_whole_curve() -> None:
    rng = random.Random(3)
    uses = [min(int(rng.expovariate(1 / 2000)), 19_999) for _ in range(60_000)]
    curve = ReuseCurve(max_tracked=512)
    for use in uses:
        curve.use([digest(use)])
        curve.tick()
    assert curve.sample_rate < 0.2
    sizes = [500, 1000, 2000, 4000, 8000]
    for size, ratio in zip(sizes, curve.miss_ratio(sizes), strict=True):
        assert ratio is not None
        assert abs(ratio - simulated(uses, size)) < 0.06, size


def test_a_larger_cache_never_misses_more_and_nothing_is_nothing() -> None:
    curve = ReuseCurve()
    assert curve.miss_ratio([1, 2]) == [None, None]
    curve.use(map(digest, [1, 2, 3, 1, 2, 3]))
    ratios = curve.miss_ratio([1, 2, 3, 4])
    assert ratios == [1.0, 1.0, 0.5, 0.5]


def test_it_goes_on_after_many_uses() -> None:
    """Old uses are forgotten: what the curve remembers is bounded."""
    curve = ReuseCurve(max_tracked=64)
    for turn in range(40_000):
        curve.use([digest(turn % 32)])
        curve.tick()
    assert len(curve._times) == len(curve._last) == 32
    (hit, miss) = curve.miss_ratio([40, 16])
    assert hit is not None
    assert miss is not None
    assert hit < 0.01
    assert miss > 0.99


def test_uses_of_one_second_are_bounded_and_the_rest_still_gives_the_curve() -> None:
    rng = random.Random(4)
    uses = [min(int(rng.expovariate(1 / 2000)), 19_999) for _ in range(60_000)]
    curve = ReuseCurve()
    for second in range(6):
        curve.use(digest(use) for use in uses[second * 10_000 : (second + 1) * 10_000])
        curve.tick()
    assert curve.sample_rate * 10_000 < 2 * MAX_PER_TICK
    (ratio,) = curve.miss_ratio([2000])
    assert ratio is not None
    assert abs(ratio - simulated(uses, 2000)) < 0.1
