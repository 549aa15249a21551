"""Sketches, the window of requests, pressure's hysteresis, the targets: pure parts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.telemetry.pressure import Side, SideState, Verdict
from console.telemetry.quantile_sketch import Sketch, merged
from console.telemetry.request_window import NUM_POINTS, RequestWindow
from console.telemetry.targets import Targets
from console.telemetry.worker_pairs import PairPaths, PairTable, busy_us
from protocol.traces import WriteSpan
from router.requests.trace import Durations, RequestTrace
from tests.unit.router.fake_worker import prefill_trace

VALUES = st.lists(st.floats(0.01, 1e6), min_size=1, max_size=200)


@given(VALUES, st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_a_quantile_is_within_one_percent_of_the_value_of_its_rank(
    values: list[float], q: float
) -> None:
    halves = [Sketch(), Sketch()]
    for place, half in enumerate(halves):
        half.add(values[place::2])
    found = merged(halves).quantile(q)
    exact = sorted(values)[int(q * (len(values) - 1))]
    assert found == pytest.approx(exact, rel=0.011)


class Clock:
    def __init__(self) -> None:
        self.us = 1_700_000_010_000_000

    def __call__(self) -> int:
        return self.us

    def pass_s(self, seconds: float) -> None:
        self.us += round(seconds * 1e6)


def durations(ttft_ms: float | None, tpot_ms: float | None, queue_ms: float | None) -> Durations:
    return {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "queue_ms": queue_ms}


GOOD = [True], [durations(100.0, 10.0, 1.0)], 5
OTHERS = [False, None], [durations(3000.0, None, 2500.0), durations(None, None, None)], 1


def test_the_last_minute_forgets_and_its_rates_know_how_long_it_is() -> None:
    clock = Clock()
    window = RequestWindow(clock)
    window.now().add(*GOOD)
    window.now().add(*OTHERS)
    clock.pass_s(10)
    minute, seconds = window.minute()
    assert (minute.ttft.count, minute.tpot.count, minute.queue.count) == (2, 1, 2)
    assert (minute.output_tokens, minute.queue.quantile(1.0)) == (6, pytest.approx(2500, rel=0.01))
    assert (minute.num_ended, minute.num_counted, minute.goodput, seconds) == (3, 2, 0.5, 10)
    clock.pass_s(25)
    window.now().add(*GOOD)
    clock.pass_s(35)
    minute, seconds = window.minute()
    assert (minute.num_ended, minute.goodput) == (1, 1.0)
    assert 55 <= seconds <= 60


@given(st.lists(st.tuples(st.sampled_from("pq"), st.integers(0, 19_000)), min_size=1, max_size=12))
def test_the_pairs_add_up_to_the_total_at_any_time(moves: list[tuple[str, int]]) -> None:
    clock = Clock()
    clock.us += 1_234_567
    window, pairs = RequestWindow(clock), PairTable(clock)
    for source, wait_ms in moves:
        clock.pass_s(wait_ms / 1000)
        pairs.moved("d", prefill_trace(source, bytes_moved=1000))
        window.add_bytes(1000)
        clock.pass_s(0.3)
        minute, seconds = window.minute()
        shown = pairs.as_json(lambda _: PairPaths("TCP", "TCP"))
        total = sum(each["bytes_per_s"] for each in shown)
        assert total == pytest.approx(minute.bytes_moved / seconds)


def test_the_hour_has_a_point_each_30_s_also_without_requests() -> None:
    clock = Clock()
    window = RequestWindow(clock)
    assert window.points() == []
    for _ in range(9):
        window.now().add(*GOOD)
        clock.pass_s(10)
    clock.pass_s(60)
    points = window.points()
    assert sum(each.num_ended for each in points) == 9
    assert points[-1].goodput is None
    starts = [each.start_us for each in points]
    assert {b - a for a, b in itertools.pairwise(starts)} == {30_000_000}
    assert all(each % 30_000_000 == 0 for each in starts)
    clock.pass_s(7200)
    points = window.points()
    assert len(points) == NUM_POINTS
    assert sum(each.num_ended for each in points) == 0
    assert points[-1].start_us + 30_000_000 <= clock.us < points[-1].start_us + 60_000_000


def observe(side: Side, clock: Clock, pressure: float | None, seconds: int) -> SideState | None:
    for _ in range(seconds):
        side.observe(pressure, clock.us)
        clock.pass_s(1)
    return side.state


def test_a_side_is_short_after_five_seconds_and_until_thirty_below() -> None:
    side, clock = Side(), Clock()
    assert observe(side, clock, 1.2, 5) is SideState.TIGHT
    assert observe(side, clock, 1.2, 1) is SideState.SHORT
    since = side.since_us
    assert observe(side, clock, 0.97, 60) is SideState.SHORT, "not below 0.95"
    assert observe(side, clock, 0.5, 30) is SideState.SHORT
    assert side.since_us == since
    assert observe(side, clock, 0.5, 1) is SideState.ROOM
    assert observe(side, clock, 0.92, 1) is SideState.TIGHT
    assert observe(side, clock, None, 1) is None


def test_a_flicker_does_not_change_the_verdict() -> None:
    side, clock = Side(), Clock()
    for _ in range(20):
        assert observe(side, clock, 1.3, 4) is SideState.TIGHT
        observe(side, clock, 0.5, 1)
    assert side.state is SideState.ROOM


@pytest.mark.parametrize(
    ("prefill", "decode", "sentence"),
    [
        (None, None, "No request in the last minute"),
        (SideState.SHORT, SideState.ROOM, "Prefill is short"),
        (SideState.TIGHT, SideState.SHORT, "Decode is short"),
        (SideState.SHORT, SideState.SHORT, "Both pools are short"),
        (SideState.TIGHT, None, "Prefill is tight"),
        (SideState.ROOM, SideState.ROOM, "Both pools have room"),
    ],
)
def test_the_verdict_in_words(
    prefill: SideState | None, decode: SideState | None, sentence: str
) -> None:
    verdict = Verdict(Side(prefill, 5), Side(decode, 7))
    assert verdict.sentence == sentence
    assert len(sentence.split()) <= 6


@pytest.mark.parametrize(
    ("fields", "is_good"),
    [
        ({"outcome": "failed"}, False),
        ({"outcome": "closed", "finished_us": 1_500_000}, None),
        ({"outcome": "closed", "finished_us": 2_500_000}, False),
        ({"first_token_us": 1_900_000}, True),
        ({"first_token_us": 2_100_000}, False),
        ({"first_token_us": 1_900_000, "last_token_us": 1_940_000, "num_output_tokens": 3}, True),
        ({"first_token_us": 1_900_000, "last_token_us": 1_960_000, "num_output_tokens": 3}, False),
    ],
)
def test_a_request_is_good_if_it_met_both_targets(fields: dict, is_good: bool | None) -> None:
    trace = RequestTrace("r", 1_000_000, 5, **({"outcome": "finished"} | fields))
    assert Targets(1000.0, None, 0.95).is_good(trace, trace.durations(), 25.0) is is_good


def test_writes_that_overlap_are_busy_once() -> None:
    writes = [WriteSpan(10, 20, 1, 0), WriteSpan(15, 30, 1, 0), WriteSpan(40, 45, 1, 0)]
    assert busy_us(writes) == 25
    assert busy_us([]) == 0


def test_an_operators_test_prompt_counts_in_no_target() -> None:
    trace = RequestTrace("test-1-0", received_us=1, num_prompt_tokens=1, outcome="failed")
    assert Targets(1000.0, None, 0.95).is_good(trace, trace.durations(), 25.0) is None
