"""The uniform numbers of rows."""

from __future__ import annotations

import itertools
from collections import Counter

from engine.sampling.row_parameters import _mix64, uniform


def test_consecutive_indices_of_one_seed_are_uniform_and_uncorrelated():
    numbers = [uniform(42, index) for index in range(20_000)]
    assert all(0 <= number < 1 for number in numbers)
    deciles = Counter(int(number * 10) for number in numbers)
    assert all(abs(deciles[decile] - 2_000) < 200 for decile in range(10))
    mean = sum(numbers) / len(numbers)
    pairs = itertools.pairwise(numbers)
    covariance = sum((a - mean) * (b - mean) for a, b in pairs) / len(numbers)
    assert abs(covariance / (1 / 12)) < 0.03


def test_the_generator_is_splitmix64_and_stays_the_same():
    """Workers of different versions must continue each other's texts."""
    golden = 0x9E3779B97F4A7C15
    assert _mix64(1234567 + golden) == 6457827717110365317  # the published test vector
    assert _mix64((1234567 + 2 * golden) % 2**64) == 3203168211198807973
    start = _mix64(7)
    assert uniform(7, 0) == (_mix64((start + golden) % 2**64) >> 11) / 2**53
    assert uniform(7, 4) == (_mix64((start + 5 * golden) % 2**64) >> 11) / 2**53
    assert uniform(7, 0) == uniform(7 + 2**64, 0)
    assert len({uniform(seed, index) for seed in range(50) for index in range(50)}) == 2_500
