"""Commands of Baton that must refuse a checkpoint: one line, and nothing that goes on running."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psutil

from cli.child import baton_command, baton_environment
from tests.forked import ForkedChild
from tests.integration.fleets import assert_no_other_processes, our_processes

WAIT_S = 120.0
WORKER = ("--device=cpu", "--num-blocks=64", "--torch-threads=1")
"""Flags of a small worker."""


def refusal_of(folder: Path, redis_url: str, *arguments: str) -> str:
    """The only line that a command prints about this model; it must end with status 2, and leave
    no process behind. A fleet is started, one of its processes forked."""
    name, *flags = arguments
    environ = {key: text for key, text in os.environ.items() if not key.startswith("BATON_")}
    environ |= {"BATON_CLUSTER_SECRET": "x" * 32, "TMPDIR": str(folder.parent)}
    if name != "up":
        environ |= {"BATON_REDIS_URL": redis_url, "BATON_LOG_LEVEL": "warning"}
    command = baton_command(name, *flags, f"--model={folder}")
    environ = baton_environment(environ)
    if name == "up":
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=WAIT_S)
        status, told = done.returncode, done.stderr
    else:
        before = our_processes()
        child = ForkedChild(name, name, command, environ, folder.parent / "log")
        child.start()
        assert child.wait(WAIT_S)
        status, told = child.exit_status(), child.log_path.read_text()
        assert_no_other_processes(before)
    assert status == 2, told
    assert not left_running(folder)
    (line,) = told.splitlines()
    assert line.startswith(f"baton {name}: ")
    assert str(folder) in line
    return line


def left_running(folder: Path) -> list[int]:
    """The processes whose command line names the model."""
    processes = psutil.process_iter(["cmdline"])
    return [each.pid for each in processes if str(folder) in " ".join(each.info["cmdline"] or ())]
