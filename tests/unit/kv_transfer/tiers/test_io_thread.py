"""Jobs run in another thread, urgent ones first, and are reported in the owner's."""

from __future__ import annotations

import threading

from kv_transfer.tiers.io_thread import IoThread, Job

WAIT_S = 20.0


def test_urgent_jobs_come_first_and_errors_are_reported() -> None:
    gate, woken = threading.Event(), threading.Semaphore(0)
    entered: list[str] = []
    thread = IoThread("tier", woken.release, lambda: entered.append("entered"))
    ran: list[str] = []
    over: list[tuple[str, str]] = []

    def job(name: str, is_urgent: bool = False) -> None:
        def run() -> None:
            ran.append(name)
            if name == "first":
                assert gate.wait(WAIT_S)
            if name == "bad":
                raise OSError("broken")

        thread.submit(Job(run, lambda error: over.append((name, str(error)))), is_urgent)

    job("first")
    job("bad")
    job("urgent", is_urgent=True)
    thread.finish()
    assert over == []
    gate.set()
    for _ in range(3):
        assert woken.acquire(timeout=WAIT_S)
    thread.finish()
    thread.close()
    assert entered == ["entered"]
    assert ran in (["first", "urgent", "bad"], ["urgent", "first", "bad"])
    assert sorted(over) == [("bad", "broken"), ("first", "None"), ("urgent", "None")]


def test_jobs_that_are_left_at_the_end_do_not_run() -> None:
    gate, begun = threading.Event(), threading.Event()
    thread = IoThread("tier", lambda: None)
    ran: list[str] = []

    def first() -> None:
        begun.set()
        assert gate.wait(WAIT_S)

    thread.submit(Job(first, lambda _: None), is_urgent=False)
    thread.submit(Job(lambda: ran.append("second"), lambda _: None), is_urgent=False)
    assert begun.wait(WAIT_S)
    closing = threading.Thread(target=thread.close)
    closing.start()
    while not thread._is_closed:
        closing.join(0.001)
    gate.set()
    closing.join(WAIT_S)
    assert ran == []


def test_a_thread_that_cannot_enter_fails_every_job() -> None:
    woken = threading.Semaphore(0)

    def enter() -> None:
        raise RuntimeError("no card")

    thread = IoThread("tier", woken.release, enter)
    ran: list[str] = []
    over: list[str] = []
    for is_urgent in (True, False):
        thread.submit(Job(lambda: ran.append("job"), lambda e: over.append(str(e))), is_urgent)
    for _ in range(2):
        assert woken.acquire(timeout=WAIT_S)
    thread.finish()
    thread.close()
    assert ran == []
    assert over == ["no card", "no card"]
