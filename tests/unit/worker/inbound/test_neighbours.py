"""A peer on this machine is gone when its process has ended, and not before."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests.unit.worker.inbound.source_pair import Pair, introduce, member


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this machine that does nothing."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill it; it waits to be reaped."""
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def test_a_neighbour_is_gone_when_its_process_has_ended_and_not_before(
    pair: Pair, process: subprocess.Popen[bytes]
) -> None:
    """It may be stopped in the middle of a write; neither silence nor its lease says more."""
    pair.info = member(pair, machine="here", pid=process.pid)
    introduce(pair)
    pair.alive = False
    process.send_signal(signal.SIGSTOP)
    assert pair.peers.take_lost(1e9) == []
    end(process)
    assert pair.peers.take_lost(2e9) == ["p-i"]
    assert pair.peers.neighbours_of_lapsed("p-i") is None, "it writes nothing any more"


def test_a_neighbour_says_itself_where_it_runs(process: subprocess.Popen[bytes]) -> None:
    """Our view of the fleet may not list it yet when its link opens."""
    pair = Pair(machine="here", pid=process.pid)
    introduce(pair)
    pair.alive = False
    still_there, _ = pair.peers.take_lost(1e9), end(process)
    gone = pair.peers.take_lost(2e9)
    pair.close()
    assert (still_there, gone) == ([], ["p-i"]), "neither silence nor its lease says more"


def test_a_process_elsewhere_is_not_looked_for_here(pair: Pair) -> None:
    pair.info = member(pair, machine="elsewhere", pid=os.getpid())
    introduce(pair)
    pair.alive = False
    assert pair.peers.take_lost(1e9) == ["p-i"]
