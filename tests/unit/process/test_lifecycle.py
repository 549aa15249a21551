"""StopSignal: signals, and the end of the parent, in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from process.lifecycle import StopSignal
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


def test_a_second_signal_ends_the_process() -> None:
    code = """
        import signal
        from process.lifecycle import StopSignal
        stop = StopSignal(lambda: None)
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
    before = threading.active_count()
    stop = StopSignal(lambda: None, parent_pid=os.getppid())
    assert threading.active_count() == before + 1
    stop.close()
    assert threading.active_count() == before
    assert not stop.is_set
