"""When a decode worker counts as cut off from all prefill workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from decode_worker.main import pod_reporter
from decode_worker.prefill_reach import PrefillReach

AFTER_S = 10.0
SILENT = {"p1": "silent for 12 s"}
ONE = "none of 1 prefill workers can be reached: p1: silent for 12 s"


class Watch:
    """A watch over `obstacles`, which a test sets; what it told, and how often it met again."""

    def __init__(self, is_required: bool = False) -> None:
        self.obstacles: dict[str, str | None] = {}
        self.told: list[tuple[bool, str]] = []
        self.num_meetings = 0
        self.reach = PrefillReach(
            lambda now: self.obstacles, self._retry_closed, AFTER_S, is_required,
            lambda is_lost, text: self.told.append((is_lost, text)),
        )  # fmt: skip

    def _retry_closed(self) -> None:
        self.num_meetings += 1

    def look_until(self, begin: float, end: float) -> None:
        """A turn every second."""
        for second in range(int(begin), int(end) + 1):
            self.reach.update(float(second))


def test_it_begins_when_none_has_been_reached_for_a_while_and_ends_with_the_first() -> None:
    watch = Watch()
    watch.obstacles = {"p1": None, "p2": "not connected yet"}
    watch.look_until(0, 30)
    watch.obstacles = SILENT
    watch.look_until(31, 40)
    assert not watch.reach.is_lost
    watch.look_until(41, 41)
    assert watch.reach.is_lost
    first = (False, "prefill workers can be reached: p1")
    assert watch.told == [first, (True, f"{ONE}; prompts are computed here")]
    watch.look_until(42, 61)
    assert len(watch.told) == 2, "said once"
    assert watch.num_meetings == 3, "tried again every ten seconds"
    watch.obstacles = {"p1": "silent for 30 s", "p3": None}
    watch.look_until(62, 62)
    assert not watch.reach.is_lost
    assert watch.told[2:] == [(False, "prefill workers can be reached again: p3")]


@dataclass
class FakePod:
    """What was written about a pod."""

    written: list[tuple[str, bool]] = field(default_factory=list)
    conditions: list[tuple[str, bool, str]] = field(default_factory=list)

    def write(self, reason: str, text: str, is_warning: bool) -> None:
        self.written.append((reason, is_warning))

    def set_condition(self, kind: str, is_true: bool, reason: str, text: str) -> None:
        self.conditions.append((kind, is_true, reason))


@pytest.mark.parametrize("has_conditions", [False, True])
def test_a_pod_shows_losses_as_events_and_its_state_as_a_condition(has_conditions: bool) -> None:
    pod: Any = FakePod()
    report = pod_reporter(pod, has_conditions)
    for is_lost in (False, True, False):
        report(is_lost, "text")
    assert pod.written == [("PrefillUnreachable", True), ("PrefillReachable", False)]
    kind = "baton/PrefillReachable"
    shown = [
        (kind, True, "PrefillReachable"),
        (kind, False, "PrefillUnreachable"),
        (kind, True, "PrefillReachable"),
    ]
    assert pod.conditions == (shown if has_conditions else [])
    pod_reporter(None, has_conditions)(True, "outside of a pod")


def test_a_moment_without_any_is_none() -> None:
    watch = Watch()
    watch.obstacles = {"p1": None}
    watch.look_until(0, 5)
    watch.obstacles = {}
    watch.look_until(6, 14)
    watch.obstacles = {"p2": None}
    watch.look_until(15, 16)
    watch.obstacles = {}
    watch.look_until(17, 26)
    assert (len(watch.told), watch.num_meetings) == (1, 0), "the first that was reached"
    watch.look_until(27, 27)
    assert watch.told[1:] == [(True, "no prefill worker is registered; prompts are computed here")]


def test_a_fleet_that_never_had_one_needs_none() -> None:
    watch = Watch()
    watch.look_until(0, 100)
    assert not watch.reach.is_lost
    assert watch.reach.not_ready_reason() is None


def test_it_does_not_make_a_worker_unready_by_itself() -> None:
    watch = Watch()
    watch.obstacles = SILENT
    watch.look_until(0, 20)
    assert watch.reach.is_lost
    assert watch.reach.not_ready_reason() is None


def test_where_prefill_is_required_it_does() -> None:
    watch = Watch(is_required=True)
    assert watch.reach.not_ready_reason() == "no prefill worker has been reached yet"
    watch.look_until(0, 10)
    assert watch.reach.not_ready_reason() == "no prefill worker is registered"
    watch.obstacles = {"p1": None}
    watch.look_until(11, 11)
    assert watch.reach.not_ready_reason() is None
    watch.obstacles = SILENT
    watch.look_until(12, 21)
    assert watch.reach.not_ready_reason() is None, "it may be back in a moment"
    watch.look_until(22, 22)
    assert watch.reach.not_ready_reason() == ONE


@pytest.mark.parametrize(("number", "more"), [(3, ""), (5, " and 2 more")])
def test_of_many_the_first_are_named(number: int, more: str) -> None:
    watch = Watch()
    watch.obstacles = {f"p{each}": "gone" for each in range(number)}
    watch.look_until(0, 10)
    ((_, text),) = watch.told
    start = f"none of {number} prefill workers can be reached: p0: gone; p1: gone; p2: gone{more};"
    assert text.startswith(start)
