"""`baton up` as PID 1 of a container: every line is JSON, and SIGTERM stops all in order."""

from __future__ import annotations

import json
import signal
import subprocess

import psutil
import pytest

from tests.containers.sandbox import baton, environment, in_namespaces, needs_namespaces
from tests.paths import DEMO_MODEL, ROOT

pytestmark = [pytest.mark.nightly, needs_namespaces()]

FLAGS = ("--port=0", "--num-blocks=512", "--torch-threads=1", "--no-pin", "--log-to=stdout")


def test_a_fleet_in_one_container() -> None:
    command = in_namespaces(baton("up", f"--model={DEMO_MODEL}", *FLAGS), "ip link set lo up")
    with subprocess.Popen(
        command, env=environment(HOME="/root"), cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as outer:  # fmt: skip
        assert outer.stdout is not None
        assert outer.stderr is not None
        try:
            seen = []
            for text in outer.stdout:
                seen.append(json.loads(text))
                if seen[-1]["message"].startswith("Ctrl-C"):
                    break
            (up,) = psutil.Process(outer.pid).children()
            for child in up.children():
                child.send_signal(signal.SIGHUP)
            up.send_signal(signal.SIGTERM)
            seen += [json.loads(text) for text in outer.stdout]
            assert outer.wait(60) == 0
            assert outer.stderr.read() == ""
        finally:
            outer.kill()
    messages = {(each["who"], each["message"]) for each in seen}
    for name in ("prefill-1", "decode-1"):
        assert (name, f"{name} stopped") in messages
    assert ("router", "stopped") in messages
    assert any(each["who"] == "valkey" and each["logger"] == "valkey" for each in seen)
