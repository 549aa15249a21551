"""Signals to PID 1, which has no default actions: from the first line on, and while it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.containers.sandbox import baton, environment, in_namespaces, needs_namespaces, python
from tests.images.dockerfiles import DOCKER
from tests.paths import ROOT
from tests.programs import find_program

pytestmark = needs_namespaces()

SLOW_TORCH = """
import time
print("importing", flush=True)
time.sleep(600)
"""


@contextmanager
def pid_1(command: list[str], **env: str) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A command as PID 1 of a namespace, once it has written its first line: its `unshare`, and
    the process itself."""
    with subprocess.Popen(
        in_namespaces(command, network=False),
        env=environment(**env), cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as outer:  # fmt: skip
        assert outer.stdout is not None
        try:
            first = outer.stdout.readline()
            assert first, "it ended"
            (inner,) = psutil.Process(outer.pid).children()
            yield outer, inner
        finally:
            outer.kill()


def test_a_worker_that_still_imports_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(SLOW_TORCH)
    path = f"{tmp_path}:{ROOT}"
    secrets = {"BATON_REDIS_URL": "redis://127.0.0.1:1", "BATON_CLUSTER_SECRET": "x" * 16}
    with pid_1(baton("decode", "--model=m"), PYTHONPATH=path, **secrets) as (outer, inner):
        inner.send_signal(signal.SIGTERM)
        assert outer.wait(60) == 0


def test_the_images_pass_on_signals_before_python_has_a_handler(tmp_path: Path) -> None:
    """Stands for the time in which the interpreter starts: a program that never has a handler."""
    path = f"{Path(find_program('tini', 'tini')).parent}:{os.environ['PATH']}"
    program, launcher = tmp_path / "venv/bin/baton", tmp_path / "bin/baton"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\necho "$1" $$\nexec sleep 600\n')
    program.chmod(0o700)
    subprocess.run(
        [DOCKER / "steps" / "launcher", tmp_path / "venv", launcher.parent], check=True, timeout=60
    )
    with pid_1([str(launcher), "router"], PATH=path) as (outer, inner):
        inner.send_signal(signal.SIGTERM)
        assert outer.wait(60) == 128 + signal.SIGTERM
    beside = subprocess.Popen([launcher, "status"], stdout=subprocess.PIPE, text=True)
    assert beside.stdout is not None
    with beside:
        assert beside.stdout.readline() == f"status {beside.pid}\n", "tini is PID 1 or not at all"
        beside.kill()


SECOND_SIGNAL = """
import signal, sys, time
from process.lifecycle import StopSignal
stop = StopSignal(lambda: None)
print("ready", flush=True)
while not stop.is_set:
    time.sleep(0.01)
print("stopping", flush=True)
time.sleep(600)
"""


def test_a_second_signal_ends_pid_1_too() -> None:
    with pid_1(python(SECOND_SIGNAL)) as (outer, inner):
        inner.send_signal(signal.SIGTERM)
        assert outer.stdout is not None
        assert outer.stdout.readline() == "stopping\n"
        inner.send_signal(signal.SIGTERM)
        assert outer.wait(60) == 128 + signal.SIGTERM


UCX = """
import os, signal
from process.lifecycle import StopSignal
from kv_transfer.transports.ucx_network import UNSIGNALLED
stop = StopSignal(lambda: None)
os.environ.update(UNSIGNALLED)
from kv_transfer.transports.registry import create_transport
transport = create_transport("nixl", "cpu")
print("ready", flush=True)
signal.raise_signal(signal.SIGHUP)
for _ in range(20):
    transport.poll()
transport.close()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="NIXL runs on Linux only")
def test_a_hangup_neither_ends_a_worker_nor_makes_ucx_talk() -> None:
    done = subprocess.run(
        python(UCX), env=environment(UCX_NET_DEVICES="lo"), cwd=ROOT, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "ready\n", "")
