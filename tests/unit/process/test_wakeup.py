"""Wakeup: a poller sees it, from whichever thread it is called."""

from __future__ import annotations

import select
import threading

from process.wakeup import Wakeup


def is_readable(wakeup: Wakeup, timeout_s: float) -> bool:
    return bool(select.select([wakeup.fileno()], [], [], timeout_s)[0])


def test_wakes_from_another_thread_and_clears() -> None:
    wakeup = Wakeup()
    assert not is_readable(wakeup, 0)
    assert not wakeup.clear()
    thread = threading.Thread(target=wakeup.wake)
    thread.start()
    assert is_readable(wakeup, 10)
    thread.join()
    assert wakeup.clear()
    assert not is_readable(wakeup, 0)
    wakeup.close()


def test_more_wakes_than_a_pipe_holds_neither_block_nor_fail() -> None:
    wakeup = Wakeup()
    for _ in range(200_000):
        wakeup.wake()
    assert wakeup.clear()
    assert not is_readable(wakeup, 0)
    wakeup.close()


def test_waking_after_close_does_nothing() -> None:
    wakeup = Wakeup()
    wakeup.close()
    successor = Wakeup()
    assert successor.fileno() == wakeup.fileno(), "the lowest numbers that are free"
    wakeup.wake()
    assert not is_readable(successor, 0)
    successor.close()
