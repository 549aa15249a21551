"""A worker that is told to stop before it serves: it ends at once and never registers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from cli.child_settings import Secrets
from cli.up_settings import UpSettings
from process.store.embedded_valkey import EmbeddedValkey
from process.store.fleet_watcher import read_fleet
from protocol.messages import Role
from tests.forked import ForkedChildren
from tests.integration.fleets import SETTINGS, wait_for

SECRET = "the secret of a test's cluster"
COMPILER = """#!/bin/sh
[ "$1" = --version ] && exec echo 1
sleep 600
"""


NODE = ("--tensor-parallel=2", "--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1")
"""Of a node whose head is not there: it builds before it joins, because a node that builds is
silent."""


@pytest.mark.parametrize("flags", [(), NODE], ids=["a worker", "a node"])
def test_one_that_builds_kernels(
    valkey: EmbeddedValkey, cluster: str, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    settings = UpSettings(**SETTINGS, cluster=cluster)
    environ = {**os.environ, "CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    children = ForkedChildren(settings, frozenset([*SETTINGS, "cluster"]), environ)
    secrets = Secrets(valkey.url, SECRET, supervisor_key="")
    worker = children.worker(Role.DECODE, "decode-1", secrets, tmp_path)
    worker.add_flags(*flags)
    worker.start()
    wait_for("the build", lambda: "building kernels" in worker.log_tail())
    process = psutil.Process(worker.pid)
    compilers = wait_for("the compilers", lambda: process.children(recursive=True))
    worker.signal(signal.SIGTERM)
    assert worker.wait(60.0), worker.log_tail()
    assert worker.exit_status() == 0
    assert "stopped while it started" in worker.log_tail()
    _, alive = psutil.wait_procs(compilers, timeout=60)
    assert not alive, "a compiler was left behind"
    assert not read_fleet(valkey.url, cluster)
    assert not [*(tmp_path / "cache").rglob("build-*"), *(tmp_path / "cache").rglob("*.so")]
