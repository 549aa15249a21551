"""StopSignal: signals, and the end of the parent, in real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable

import pytest

from process.lifecycle import Stopped, StopSignal
from tests.paths import ROOT


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_noted_and_wakes(number: signal.Signals) -> None:
    woken = threading.Event()
    former = signal.getsignal(number)
    stop = StopSignal(woken.set)
    assert stop.since is None
    assert not stop.is_set
    signal.raise_signal(number)
    assert stop.is_set
    assert woken.is_set()
    since = stop.since
    stop.request()
    assert stop.since == since, "the first wish counts"
    stop.close()
    assert signal.getsignal(number) == former


@pytest.mark.parametrize("before", ["", "stop.request()", "stop.insist()"])
def test_a_second_signal_ends_the_process(before: str) -> None:
    """A request to stop that came without a signal does not count as the first signal."""
    code = f"""
        import signal
        from process.lifecycle import StopSignal
        stop = StopSignal(lambda: None)
        {before}
        signal.raise_signal(signal.SIGTERM)
        print("still here", flush=True)
        signal.raise_signal(signal.SIGTERM)
        print("not reached", flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, check=False
    )
    assert done.stdout == b"still here\n"
    assert done.returncode == -signal.SIGTERM


def test_a_child_stops_when_its_parent_is_killed() -> None:
    """The parent starts a child that waits for StopSignal, then is killed without a chance."""
    code = """
        import os, subprocess, sys, time
        child = '''
        import os, threading
        from process.lifecycle import StopSignal
        woken = threading.Event()
        stop = StopSignal(woken.set, parent_pid=int(os.environ["PARENT"]))
        print("watching", flush=True)
        woken.wait(60)
        print("stopped" if stop.is_set else "waited in vain", flush=True)
        '''
        import textwrap
        env = {**os.environ, "PARENT": str(os.getpid())}
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(child)], env=env)
        time.sleep(60)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent.stdout:
        assert parent.stdout.readline() == "watching\n"
        parent.kill()
        parent.wait()
        assert parent.stdout.read() == "stopped\n", "read to the end: the child has closed it, too"


def test_close_ends_the_watch_of_the_parent() -> None:
    before = set(threading.enumerate())
    stop = StopSignal(lambda: None, parent_pid=os.getppid())
    (watch,) = set(threading.enumerate()) - before
    stop.close()
    assert not watch.is_alive()
    assert not stop.is_set


def start(stop: StopSignal, phases: list[Callable[[], object]]) -> int:
    """Run phases of a start; returns how many ended."""
    num_ended = 0
    with contextlib.suppress(Stopped), stop.raised():
        for phase in phases:
            phase()
            num_ended += 1
    return num_ended


def tell_to_stop() -> None:
    signal.raise_signal(signal.SIGTERM)


def swallow() -> None:
    """As some libraries do."""
    with contextlib.suppress(BaseException):
        tell_to_stop()


def test_while_a_process_starts_the_request_is_raised() -> None:
    stop = StopSignal(lambda: None)
    assert start(stop, [lambda: None, tell_to_stop, lambda: None]) == 1
    assert stop.is_set
    assert start(stop, [lambda: None]) == 0, "told before it began"
    stop.close()


def test_a_request_that_is_swallowed_is_raised_by_the_next_check() -> None:
    stop = StopSignal(lambda: None)
    assert start(stop, [swallow, lambda: None, stop.check, lambda: None]) == 2
    stop.close()
    stop = StopSignal(lambda: None)
    with pytest.raises(Stopped), stop.raised():
        swallow()
    stop.close()


def test_once_it_serves_the_request_is_only_noted() -> None:
    stop = StopSignal(lambda: None)
    with stop.raised():
        pass
    signal.raise_signal(signal.SIGTERM)
    assert stop.is_set
    stop.close()


def test_a_hangup_only_calls_its_owner() -> None:
    hung_up = threading.Event()
    former = signal.getsignal(signal.SIGHUP)
    stop = StopSignal(lambda: None, on_hangup=hung_up.set)
    signal.raise_signal(signal.SIGHUP)
    assert hung_up.is_set()
    assert not stop.is_set
    stop.close()
    assert signal.getsignal(signal.SIGHUP) == former


def test_while_a_process_starts_another_thread_may_insist() -> None:
    stop = StopSignal(lambda: None)
    waiting, other = threading.Event(), threading.Thread(target=stop.insist)
    assert start(stop, [other.start, lambda: waiting.wait(60), lambda: None]) < 2
    assert not stop.withdraw()
    assert stop.is_set
    other.join()
    stop.close()


@pytest.mark.parametrize("how", [StopSignal.insist, lambda stop: tell_to_stop()])
def test_what_was_only_asked_for_can_be_withdrawn(how: Callable[[StopSignal], None]) -> None:
    stop = StopSignal(lambda: None)
    try:
        stop.request()
        assert stop.withdraw()
        assert not stop.is_set
        how(stop)
        assert not stop.withdraw()
        assert stop.is_set
    finally:
        stop.close()
