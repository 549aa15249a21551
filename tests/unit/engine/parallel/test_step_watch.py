"""A step on cards that does not end is noticed; with fences that a test passes."""

from __future__ import annotations

import threading

from engine.fences import PASSED
from engine.parallel.step_watch import StepWatch


class Open:
    """A fence that the device has not passed yet."""

    is_passed = False

    def is_done(self) -> bool:
        return self.is_passed

    def wait(self) -> None:
        raise AssertionError("the watch never waits for a device")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_step_that_takes_too_long_is_told_once_it_does() -> None:
    told: list[str] = []
    clock = Clock()
    watch = StepWatch(30.0, told.append, clock)
    assert not watch.has_lost()
    first, second = Open(), Open()
    watch.note(PASSED)
    watch.note(first)
    clock.now = 20.0
    watch.note(second)
    clock.now = 29.9
    assert not watch.has_lost()
    first.is_passed = True
    clock.now = 31.0
    assert not watch.has_lost(), "the first one has ended, the second one has 19 s left"
    assert not told
    clock.now = 50.0
    assert watch.has_lost()
    assert told == ["a step of all ranks has not ended within 30 s"]


def test_a_later_step_gives_the_first_one_no_more_time() -> None:
    told: list[str] = []
    clock = Clock()
    watch = StepWatch(30.0, told.append, clock)
    watch.note(Open())
    clock.now = 29.9
    watch.note(Open())
    assert not watch.has_lost()
    clock.now = 30.0
    assert watch.has_lost()
    assert told == ["a step of all ranks has not ended within 30 s"]


class Failing(Open):
    def is_done(self) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_card_that_has_failed_is_told() -> None:
    told: list[str] = []
    watch = StepWatch(30.0, told.append, Clock())
    watch.note(Failing())
    assert watch.has_lost()
    assert told == ["a card has failed: CUDA error: an illegal memory access was encountered"]


def test_a_thread_looks_until_it_has_told() -> None:
    was_told = threading.Event()
    watch = StepWatch(0.05, lambda reason: was_told.set())
    watch.note(Open())
    watch.start()
    assert was_told.wait(30.0)
