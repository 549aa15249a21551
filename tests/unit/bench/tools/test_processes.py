"""No process of a benchmark stays behind: not when it closes, and not when it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bench.tools.processes import Processes

WAIT_S = 30
TREE = ("sh", "-c", "setsid sh -c 'sleep 600 & echo >$0; wait' $0 & wait")
"""A command with a child in a session of its own, which has a child. Then it writes to the pipe
that is its last argument."""
BENCHMARK = f"""
import os, signal
import psutil
from bench.tools.processes import Processes
processes = Processes("test")
ready = processes.folder / "ready"
os.mkfifo(ready)
processes.start("leader", [*{TREE!r}, str(ready)], {{}})
ready.read_text()
leader = psutil.Process(processes.pids["leader"])
children = leader.children(recursive=True)
for each in (leader, *children):
    each.send_signal(signal.SIGSTOP)
print(leader.pid, *(each.pid for each in children), flush=True)
signal.pause()
"""


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command, env = [sys.executable, "-c", BENCHMARK], {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as benchmark:
        yield benchmark
        benchmark.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_stopped_processes_of_a_killed_benchmark_end_with_their_children(killed, number) -> None:
    started = [psutil.Process(int(pid)) for pid in killed.stdout.readline().split()]
    assert len(started) == 3
    killed.send_signal(number)
    assert psutil.wait_procs(started, timeout=WAIT_S)[1] == []


def test_nothing_stays_behind_closed_processes() -> None:
    before = set(psutil.Process().children())
    processes = Processes("test")
    for name in ("one", "other"):
        processes.start(name, ["sleep", "600"], {})
    started = set(psutil.Process().children()) - before
    assert {each.pid for each in started} > set(processes.pids.values())
    processes.close()
    assert [each for each in started if each.is_running()] == []
    assert not processes.folder.exists()
    processes.close()
