"""A pytest process that is killed leaves no forked process behind."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from tests.integration.fleets import wait_for
from tests.paths import ROOT

FLEET = """
from tests.integration.fleets import running_fleet

with running_fleet(prefill=0, decode=1, decode_tensor_parallel=2):
    print("runs", flush=True)
    input()
"""


@pytest.mark.nightly
def test_a_forked_fleet_ends_with_its_killed_test() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", FLEET], env=environment, **pipes) as test:  # type: ignore[call-overload]
        assert test.stdout.readline() == b"runs\n"
        started = psutil.Process(test.pid).children(recursive=True)
        assert len(started) > 3, "a fork server, a router, a decode worker and its hand"
        test.kill()
        assert test.wait(60) < 0
    wait_for("all to end", lambda: not any(each.is_running() for each in started))
