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
CHILD = "import time; time.sleep(600)"
LEADER = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""
BENCHMARK = f"""
import signal, sys, time
import psutil
from bench.tools.processes import Processes
processes = Processes("test")
processes.start("leader", [sys.executable, "-c", {LEADER!r}], {{}})
leader = psutil.Process(processes.pids["leader"])
while not (children := leader.children()):
    time.sleep(0.01)
for each in (leader, *children):
    each.send_signal(signal.SIGSTOP)
print(leader.pid, children[0].pid, flush=True)
time.sleep(600)
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
    killed.send_signal(number)
    assert psutil.wait_procs(started, timeout=WAIT_S)[1] == []


def test_nothing_stays_behind_closed_processes() -> None:
    before = set(psutil.Process().children())
    processes = Processes("test")
    for name in ("one", "other"):
        processes.start(name, [sys.executable, "-c", CHILD], {})
    started = set(psutil.Process().children()) - before
    assert {each.pid for each in started} > set(processes.pids.values())
    processes.close()
    assert [each for each in started if each.is_running()] == []
    assert not processes.folder.exists()
    processes.close()
