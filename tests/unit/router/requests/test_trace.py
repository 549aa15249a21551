"""Traces: what is kept, how long, and what the numbers mean."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from process.trace_context import CURRENT_TRACE, TraceContext
from protocol.traces import ChunkSpan, DecodeTrace
from router.metrics import FleetMetrics
from router.requests.trace import AttemptTrace
from router.requests.trace_json import receipt_json, trace_json
from router.requests.trace_store import MAX_UNTOLD, TraceStore
from router.routing.placement import Candidate, Mode, Placement
from tests.unit.router.fake_worker import prefill_trace


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def store(registry: CollectorRegistry) -> TraceStore:
    clock = itertools.count(1_000_000, 10_000)
    return TraceStore(3, FleetMetrics(registry), lambda: next(clock))


def candidate(worker_id: str) -> Candidate:
    return Candidate(worker_id, 1.0, 1, 1)


PLACEMENT = Placement(
    Mode.REMOTE, candidate("d1"), candidate("p1"), "why", (candidate("d1"),), (), ()
)


def run(store: TraceStore, request_id: str, outcome: str = "finished") -> None:
    store.end(store.begin(request_id, 5), outcome)


def test_only_the_last_ones_are_kept(store: TraceStore) -> None:
    for number in range(5):
        run(store, f"r{number}")
    assert [store.get(f"r{number}") is not None for number in range(5)] == [
        False, False, True, True, True,
    ]  # fmt: skip
    assert store.num_running == 0


def test_those_that_ended_are_told_many_at_once_and_before_metrics_are_read(
    store: TraceStore, registry: CollectorRegistry
) -> None:
    told: list[str] = []

    def listener(traces, durations) -> None:
        told.extend(each.request_id for each in traces)
        assert list(durations) == [each.durations() for each in traces]

    store.on_ended(listener)
    names = [f"r{number}" for number in range(MAX_UNTOLD + 2)]
    for name in names[:-3]:
        run(store, name)
    assert told == []
    run(store, names[-3])
    assert told == names[:-2]
    for name in names[-2:]:
        run(store, name)
    assert told == names[:-2]
    assert registry.get_sample_value("baton_tokenize_seconds_count") == len(names)
    assert told == names
    store.report_ended()
    assert told == names


def test_running_ones_are_kept_whatever_ends(store: TraceStore) -> None:
    trace = store.begin("long", 5)
    for number in range(9):
        run(store, f"r{number}")
    assert store.get("long") is trace
    assert trace_json(trace, 0)["outcome"] == "running"
    assert trace_json(trace, 0)["placement"] is None


def test_an_id_that_is_used_again_shows_its_last_use(store: TraceStore) -> None:
    run(store, "again", "failed")
    run(store, "again", "finished")
    found = store.get("again")
    assert found is not None
    assert found.outcome == "finished"


@pytest.mark.parametrize("former_ends_first", [True, False])
def test_a_stream_that_is_resumed_shows_its_later_life(
    store: TraceStore, former_ends_first: bool
) -> None:
    former = store.begin("r", 5)
    later = store.begin("r", 5)
    later.attempts.append(AttemptTrace(1 << 16, PLACEMENT, 1))
    if former_ends_first:
        store.end(former, "failed")
    assert store.get("r") is later
    decode = DecodeTrace(worker_id="d1", received_us=1)
    store.attach_decode("r", 1 << 16, decode)
    assert later.attempts[0].decode is decode
    store.end(later, "finished")
    if not former_ends_first:
        store.end(former, "failed")
    assert store.get("r") is later
    assert store.num_running == 0


def test_a_request_id_stands_for_its_first_choice(store: TraceStore) -> None:
    run(store, "chat-1")
    assert store.get("chat") is None
    run(store, "chat-0")
    found = store.get("chat")
    assert found is not None
    assert found.request_id == "chat-0"


def test_the_final_prefill_trace_may_come_after_the_end(
    store: TraceStore, registry: CollectorRegistry
) -> None:
    trace = store.begin("r", 5)
    trace.attempts.append(AttemptTrace(1, PLACEMENT, 1, "p1"))
    store.attach_prefill("r", 1, prefill_trace("p1"), is_final=False)
    store.end(trace, "finished")
    done = prefill_trace("p1", blocks_moved=7, bytes_moved=700, transport="nixl")
    store.attach_prefill("r", 1, done, is_final=True)
    store.attach_prefill("r", 9, done, is_final=False)
    store.attach_prefill("unknown", 1, done, is_final=False)
    shown = trace_json(trace, 0)
    assert (shown["blocks_moved"], shown["bytes_moved"]) == (7, 700)
    assert shown["transport"] == "nixl"
    assert registry.get_sample_value("baton_router_blocks_moved_total") == 7


def test_durations_of_a_remote_attempt(store: TraceStore) -> None:
    trace = store.begin("r", 5)
    trace.attempts.append(AttemptTrace(1, PLACEMENT, 1, "p1"))
    chunks = (ChunkSpan(2_000, 4_000, 16), ChunkSpan(5_000, 9_000, 16))
    prefill = prefill_trace("p1", received_us=500, scheduled_us=2_000, chunks=chunks)
    store.attach_prefill("r", 1, prefill, is_final=False)
    store.attach_decode("r", 1, DecodeTrace(worker_id="d1", received_us=1, first_step_us=11_000))
    trace.first_token_us, trace.last_token_us, trace.num_output_tokens = 1_020_000, 1_060_000, 5
    assert trace.durations() == {
        "tokenize_ms": 0.0,
        "placement_ms": 0.0,
        "dispatch_ms": 0.499,
        "delivery_ms": None,
        "first_step_ms": None,
        "total_ms": 60.0,
        "ttft_ms": 20.0,
        "queue_ms": 1.5,
        "prefill_ms": 7.0,
        "handoff_ms": 2.0,
        "decode_ms": 40.0,
        "tpot_ms": 10.0,
    }


def test_durations_of_a_local_attempt(store: TraceStore) -> None:
    trace = store.begin("r", 5)
    trace.attempts.append(AttemptTrace(1, PLACEMENT, 1))
    decode = DecodeTrace(
        worker_id="d1", received_us=1_000, admitted_us=1_500, chunks=(ChunkSpan(3_000, 5_000, 9),)
    )
    store.attach_decode("r", 1, decode)
    durations = trace.durations()
    assert (durations["queue_ms"], durations["prefill_ms"]) == (2.0, 2.0)
    assert durations["handoff_ms"] is durations["ttft_ms"] is durations["tpot_ms"] is None
    assert trace_json(trace, 0)["num_chunks"] == 1


def test_clocks_that_disagree_give_no_negative_time(store: TraceStore) -> None:
    trace = store.begin("r", 5)
    trace.attempts.append(AttemptTrace(1, PLACEMENT, 1, "p1"))
    prefill = prefill_trace("p1", chunks=(ChunkSpan(1, 9_000, 1),))
    store.attach_prefill("r", 1, prefill, is_final=True)
    store.attach_decode("r", 1, DecodeTrace(worker_id="d1", received_us=1, first_step_us=8_000))
    assert trace.durations()["handoff_ms"] == 0.0


def test_histograms_count_what_happened_only(
    store: TraceStore, registry: CollectorRegistry
) -> None:
    run(store, "r")
    assert registry.get_sample_value("baton_handoff_seconds_count") == 0
    trace = store.begin("s", 5)
    trace.first_token_us, trace.last_token_us, trace.num_output_tokens = 2_000_000, 2_500_000, 2
    store.end(trace, "finished")
    assert registry.get_sample_value("baton_decode_seconds_sum") == 0.5


def test_a_trace_names_the_clients_own_one(store: TraceStore) -> None:
    token = CURRENT_TRACE.set(TraceContext("a" * 32, "b" * 16, "c" * 16, "01"))
    try:
        run(store, "traced")
    finally:
        CURRENT_TRACE.reset(token)
    run(store, "other")
    shown = [trace_json(store.get(name), 0)["trace_id"] for name in ("traced", "other")]
    assert shown == ["a" * 32, None]


def test_prompt_tokens_are_counted_by_their_source(
    store: TraceStore, registry: CollectorRegistry
) -> None:
    trace = store.begin("r", 100)
    trace.attempts.append(AttemptTrace(1, PLACEMENT, 1_000_000))
    chunks = (ChunkSpan(1_000_000, 1_010_000, 68),)
    decode = DecodeTrace(worker_id="d1", received_us=1_000_000, cached_tokens=32, chunks=chunks)
    store.attach_decode("r", 1, decode)
    trace.first_token_attempt, trace.num_cached_tokens = trace.attempts[0], 32
    store.end(trace, "finished")
    counted = {
        source: registry.get_sample_value("baton_prompt_tokens_by_source_total", {"source": source})
        for source in ("cached", "computed")
    }
    assert counted == {"cached": 32, "computed": 68}


def test_the_prediction_shown_is_that_of_the_attempt_with_the_first_token(
    store: TraceStore,
) -> None:
    """An attempt that only continues the output predicts nothing of the first token."""
    trace = store.begin("r", 100)
    predicted = [msgspec.structs.replace(PLACEMENT, ttft_ms=ms) for ms in (50.0, 9.0)]
    trace.attempts += [AttemptTrace(n + 1, each, n + 1) for n, each in enumerate(predicted)]

    def shown() -> tuple[int | None, float]:
        found = receipt_json(trace, 0)
        return found["first_token_attempt"], found["predicted_ttft_ms"]

    assert shown() == (None, 9.0)
    for attempt, number, ms in zip(trace.attempts, (1, 2), (50.0, 9.0), strict=True):
        trace.first_token_attempt = attempt
        assert shown() == (number, ms)


def test_only_workers_of_an_attempt_add_their_times(store: TraceStore) -> None:
    trace = store.begin("r", 100)
    trace.attempts.append(AttemptTrace(1, PLACEMENT, 1, "p1"))
    store.attach_prefill("r", 1, prefill_trace("other"), is_final=True)
    store.attach_decode("r", 1, DecodeTrace(worker_id="other", received_us=1))
    assert trace.attempts[0].prefill is trace.attempts[0].decode is None
