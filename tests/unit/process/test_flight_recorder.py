"""The flight recorder: bounded, in order, filtered by request and time, read in pages."""

from __future__ import annotations

import gc

from process.flight_recorder import PAGE, FlightRecorder
from protocol.flight import FlightEvent, FlightKind

BOOT_US = 1_000_000_000  # wall clock at 0 s of the monotonic one


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def wall_us(self) -> int:
        return BOOT_US + round(self.now_s * 1e6)


def recorder_and_clock(capacity: int = 10) -> tuple[FlightRecorder, Clock]:
    clock = Clock()
    return FlightRecorder(clock, clock.wall_us, capacity), clock


def whole(recorder: FlightRecorder, **filters: object) -> list[FlightEvent]:
    events, after = recorder.page(**filters)  # type: ignore[arg-type]
    while after:
        more, after = recorder.page(after, **filters)  # type: ignore[arg-type]
        events += more
    return events


def test_events_have_the_wall_clock_s_times() -> None:
    recorder, clock = recorder_and_clock()
    clock.now_s = 2.5
    recorder.note(FlightKind.RECEIVED, ("r", 1), tokens=9)
    recorder.note(FlightKind.LAGGED, since=2.0)
    recorder.note_span(1.0, 1.25, FlightKind.STEP, number=3, tokens=64)
    clock.now_s = 7.0  # reading later does not move them
    assert whole(recorder) == [
        FlightEvent(BOOT_US + 2_500_000, 0, FlightKind.RECEIVED, "r", 1, 0, 9, ""),
        FlightEvent(BOOT_US + 2_000_000, 500_000, FlightKind.LAGGED),
        FlightEvent(BOOT_US + 1_000_000, 250_000, FlightKind.STEP, number=3, tokens=64),
    ]


def test_the_oldest_events_make_room() -> None:
    recorder, _ = recorder_and_clock(capacity=3)
    for number in range(5):
        recorder.note(FlightKind.STEP, number=number)
    assert [each.number for each in whole(recorder)] == [2, 3, 4]


def test_a_request_s_events_come_with_those_of_no_request_in_its_time() -> None:
    recorder, clock = recorder_and_clock()
    for at, name in ((1.0, ""), (2.0, "mine"), (3.0, "other"), (4.0, ""), (5.0, "mine"), (9.0, "")):
        clock.now_s = at
        recorder.note(FlightKind.STEP, (name, 0))
    found = whole(
        recorder, request_id="mine", since_us=BOOT_US + 2_000_000, until_us=BOOT_US + 5_000_000
    )
    assert [(each.at_us - BOOT_US, each.request_id) for each in found] == [
        (2_000_000, "mine"), (4_000_000, ""), (5_000_000, "mine"),
    ]  # fmt: skip


def test_pages_join_to_the_whole_also_when_the_ring_moves_on_between_them() -> None:
    recorder, _ = recorder_and_clock(capacity=2 * PAGE)
    for number in range(3 * PAGE):
        recorder.note(FlightKind.STEP, number=number)
    first, after = recorder.page()
    assert [each.number for each in first] == list(range(PAGE, 2 * PAGE))
    for number in range(3 * PAGE, 3 * PAGE + 10):
        recorder.note(FlightKind.STEP, number=number)
    second, after = recorder.page(after)
    assert [each.number for each in second] == list(range(2 * PAGE, 3 * PAGE))
    third, end = recorder.page(after)
    assert [each.number for each in third] == list(range(3 * PAGE, 3 * PAGE + 10))
    assert end == 0


def test_an_empty_recorder_has_nothing_and_long_texts_are_cut() -> None:
    recorder, _ = recorder_and_clock()
    assert recorder.page() == ([], 0)
    recorder.note(FlightKind.FAILED, ("r", 0), text="x" * 1000)
    assert len(whole(recorder)[0].text) == 200


def test_the_garbage_collector_does_not_look_through_the_ring() -> None:
    recorder, _ = recorder_and_clock(capacity=1000)
    for number in range(1000):
        recorder.note(FlightKind.STEP, ("r", 1), number=number, text="why")
    gc.collect()
    assert not any(gc.is_tracked(each) for each in recorder._ring)
