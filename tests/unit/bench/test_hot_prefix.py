"""What the benchmark of hot prefixes sends, and when it fails."""

from __future__ import annotations

from collections import Counter

from bench.hot_prefix import OWN_TOKENS, PREFIX_TOKENS, Load, Result, verdict


def result(ttft_ms: list[float], computed: int = 100) -> Result:
    return Result("r", ttft_ms, computed, Counter())


def test_prompts_share_their_prefix_and_nothing_else() -> None:
    load = Load("m", 1000, 20, 1.0, 10)
    prompts = load.prompts()
    assert len(prompts) == 21
    assert len({tuple(each[:PREFIX_TOKENS]) for each in prompts}) == 1
    assert len({tuple(each[PREFIX_TOKENS:]) for each in prompts}) == 21
    assert {len(each) for each in prompts} == {PREFIX_TOKENS + OWN_TOKENS}
    assert load.prompts() == prompts


def test_the_default_must_be_near_the_best_and_compute_little_more_than_a_cache_would_ask() -> None:
    ours, best = result([100.0] * 99 + [200.0]), result([80.0] * 99 + [190.0])
    assert verdict(ours, [ours, best], result([1.0])) == []
    slow = result([110.0] * 90 + [900.0] * 10)
    assert verdict(slow, [slow, best], result([1.0])) == [
        "TTFT p50 is 1.38x the best, bound 1.3x",
        "TTFT p99 is 11.25x the best, bound 1.3x",
    ]
    assert "computed tokens" in verdict(ours, [ours], result([1.0], computed=90))[0]
