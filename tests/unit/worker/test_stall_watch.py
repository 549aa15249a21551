"""When a worker counts as standing still."""

from __future__ import annotations

from worker.stall_watch import StallWatch


def somebody() -> bool:
    return True


def nobody() -> bool:
    return False


def test_it_is_stalled_while_requests_wait_and_nothing_happens() -> None:
    watch = StallWatch(bound_s=10.0)
    assert not watch.update(0.0, progress=1, waits=somebody)
    assert not watch.update(9.9, progress=1, waits=somebody)
    assert watch.update(10.0, progress=1, waits=somebody)
    assert watch.is_stalled
    assert not watch.update(11.0, progress=1, waits=somebody), "it is told once"
    assert watch.update(12.0, progress=2, waits=somebody)
    assert not watch.is_stalled


def test_one_without_waiting_requests_is_idle() -> None:
    watch = StallWatch(bound_s=10.0)
    assert not watch.update(0.0, progress=1, waits=nobody)
    assert not watch.update(50.0, progress=1, waits=nobody)
    assert not watch.update(51.0, progress=1, waits=somebody)
    assert watch.update(60.0, progress=1, waits=somebody)
    assert watch.update(60.5, progress=1, waits=nobody), "its requests went elsewhere"
