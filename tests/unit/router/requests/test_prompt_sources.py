"""Where each part of a prompt was found, and what it cost."""

from __future__ import annotations

from protocol.traces import ChunkSpan, FetchSpan, PrefillTrace
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
    parts = [(e["source"], e["worker_id"], e["num_tokens"], e["ms"]) for e in prompt_sources(trace)]
    assert parts == [
        ("own cache", "p1", 32, 0.0),
        ("disk", "p1", 32, 3.0),
        ("host memory", "p1", 64, 1.0),
        ("peer", "d1", 128, 5.0),
        ("peer", "d2", 32, 1.5),
        ("computed", "p1", 24, 21.5),
    ]
    assert prompt_sources(None) == []
