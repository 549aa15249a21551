"""A worker's step time and token rate from its load reports."""

from __future__ import annotations

import pytest

from protocol.events import WorkerStats
from router.fleet.worker_rates import Rates


def stats(at_s: float, steps: int, tokens: int) -> WorkerStats:
    counters = {"steps": steps, "step_us": steps * 20_000, "decode_tokens": tokens}
    return WorkerStats(
        worker_id="d1", incarnation="i", num_waiting=0, num_running=0, queued_tokens=0,
        blocks_total=1, blocks_used=0, blocks_cached=0, reported_us=round(at_s * 1e6),
        counters=counters,
    )  # fmt: skip


def test_rates_over_the_last_seconds() -> None:
    rates = Rates()
    rates.observe(stats(100, 10, 1000))
    assert rates.step_ms is rates.tokens_per_s is None
    for tenth in range(1, 21):
        rates.observe(stats(100 + tenth / 10, 10 + tenth, 1000 + 20 * tenth))
    assert rates.step_ms == pytest.approx(20)
    assert rates.tokens_per_s == pytest.approx(200)
    for second in range(3, 60):
        rates.observe(stats(100 + second, 30, 1400))
    assert rates.tokens_per_s == 0
    assert rates.step_ms is None
