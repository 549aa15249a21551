"""The switch of the benchmark of recording, and its figures."""

from __future__ import annotations

import random

from bench.router.recording import median_interval
from bench.router.unrecorded import SILENT, switch_of_recording


def test_the_switch_silences_each_part_and_brings_it_back() -> None:
    before = [getattr(owner, name) for owner, name, _ in SILENT]
    switch = switch_of_recording()
    switch()
    during = [getattr(owner, name) for owner, name, _ in SILENT]
    switch()
    assert during == [silent for _, _, silent in SILENT]
    assert [getattr(owner, name) for owner, name, _ in SILENT] == before


def test_the_interval_holds_the_median_and_narrows_with_the_turns() -> None:
    rng = random.Random(5)
    ratios = [rng.gauss(1.05, 0.1) for _ in range(400)]
    low, middle, high = median_interval(ratios)
    assert low < middle < high
    few_low, _, few_high = median_interval(ratios[:20])
    assert high - low < few_high - few_low
