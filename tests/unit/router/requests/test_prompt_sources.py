"""Where each part of a prompt was found, and what it cost."""

from __future__ import annotations

import msgspec

from protocol.traces import ChunkSpan, DecodeTrace, FetchSpan, PrefillTrace
from router.requests.prompt_sources import prompt_sources


def test_each_part_is_named_with_its_tokens_and_its_time() -> None:
    trace = PrefillTrace(
        worker_id="p1",
        received_us=0,
        scheduled_us=0,
        cached_tokens=32,
        fetched_tokens=256,
        fetches=(
            FetchSpan("", 2, 2, 2, 0, 3_000, "", 500, 9_000, tier="disk"),
            FetchSpan("", 2, 4, 4, 0, 1_000, "", 500, 9_000, tier="host memory"),
            FetchSpan("d1", 2, 8, 8, 1_000, 6_000, "", 4_000, 40_000),
            FetchSpan("d2", 10, 4, 2, 6_000, 7_500, "evicted", 2_000, 20_000),
            FetchSpan("d3", 12, 4, 0, 8_000, 9_000, "evicted", 2_000, 20_000),
        ),
        chunks=(ChunkSpan(10_000, 30_000, 20), ChunkSpan(30_000, 31_500, 4)),
    )
    assert sources(trace, 312, 288) == [
        ("own cache", "p1", 32, 0.0),
        ("disk", "p1", 32, 3.0),
        ("host memory", "p1", 64, 1.0),
        ("peer", "d1", 128, 5.0),
        ("peer", "d2", 32, 1.5),
        ("computed", "p1", 24, 21.5),
    ]
    assert prompt_sources(None, 312, 288) == []


def test_tokens_that_are_computed_again_after_a_preemption_count_once() -> None:
    """One before the first token, and another one behind it."""
    trace = DecodeTrace(
        worker_id="d1",
        received_us=0,
        cached_tokens=32,
        chunks=(
            ChunkSpan(0, 1_000, 16),
            ChunkSpan(5_000, 9_000, 64),
            ChunkSpan(30_000, 40_000, 99),
        ),
        first_token_us=9_500,
    )
    assert sources(trace, 96, 96 - 80) == [
        ("own cache", "d1", 16, 0.0),
        ("computed", "d1", 80, 5.0),
    ]
    lost_all = msgspec.structs.replace(trace, chunks=(*trace.chunks, ChunkSpan(9_000, 9_100, 90)))
    assert sources(lost_all, 96, 0) == [("computed", "d1", 96, 5.1)]
    fetch = FetchSpan("d2", 0, 4, 4, 0, 2_000, "", 500, 9_000)
    fetched = msgspec.structs.replace(trace, cached_tokens=0, fetched_tokens=64, fetches=(fetch,))
    assert sources(fetched, 96, 16) == [("peer", "d2", 16, 2.0), ("computed", "d1", 80, 5.0)]


def sources(
    trace: PrefillTrace | DecodeTrace, num_tokens: int, num_cached: int
) -> list[tuple[str, str, int, float]]:
    found = prompt_sources(trace, num_tokens, num_cached)
    return [(each["source"], each["worker_id"], each["num_tokens"], each["ms"]) for each in found]
