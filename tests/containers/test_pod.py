"""Processes as in a pod: PID 1 without capabilities, a read-only root, service links."""

from __future__ import annotations

import signal
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.containers.sandbox import as_a_pod, baton, environment, in_namespaces, needs_namespaces
from tests.paths import DEMO_MODEL, ROOT

pytestmark = needs_namespaces()

READ_ONLY = """
mount --make-rprivate /
for folder in / /tmp /var/tmp; do ! mountpoint -q $folder || mount -o remount,bind,ro $folder; done
"""
LINKS = {
    "BATON_SERVICE_HOST": "10.0.0.1",
    "BATON_SERVICE_PORT": "80",
    "BATON_PORT": "tcp://10.0.0.1:80",
    "BATON_PORT_80_TCP_ADDR": "10.0.0.1",
    "BATON_METRICS_PORT": "tcp://10.0.0.2:80",
}
SECRETS = {"BATON_REDIS_URL": "redis://127.0.0.1:1\n", "BATON_CLUSTER_SECRET": f"{'x' * 16}\n"}


def test_a_router_serves_and_stops_in_order(tmp_path: Path) -> None:
    flags = ("--host=[::1]", "--port=0", f"--model={DEMO_MODEL}", "--lame-duck-s=0.1")
    command = in_namespaces(
        [*as_a_pod(ROOT / "cli", DEMO_MODEL), *baton("router", *flags)], READ_ONLY, network=False
    )
    with subprocess.Popen(
        command, env=environment(**LINKS, **SECRETS, HOME="/"), cwd=ROOT, text=True,
        stderr=subprocess.PIPE,
    ) as outer:  # fmt: skip
        assert outer.stderr is not None
        try:
            seen = []
            for line in outer.stderr:
                seen.append(line)
                if "listening on" in line:
                    break
            assert "listening on http://[::1]:" in seen[-1], seen
            url = seen[-1].split()[-1]
            with urllib.request.urlopen(f"{url}/live", timeout=60) as answer:
                assert answer.status == 200
            (inner,) = psutil.Process(outer.pid).children()
            status = Path(f"/proc/{inner.pid}/status").read_text()
            assert "CapEff:\t0000000000000000" in status
            assert status.partition("NSpid:\t")[2].splitlines()[0].split()[-1] == "1", "PID 1"
            inner.send_signal(signal.SIGHUP)
            with pytest.raises(urllib.error.HTTPError, match="503"):
                urllib.request.urlopen(f"{url}/ready", timeout=60)
            inner.send_signal(signal.SIGTERM)
            rest = outer.stderr.read()
            assert outer.wait(60) == 0, rest
        finally:
            outer.kill()
    assert "Traceback" not in "".join(seen) + rest


def test_without_a_folder_for_temporary_files_there_is_one_line() -> None:
    command = in_namespaces(baton("up", f"--model={DEMO_MODEL}"), READ_ONLY)
    done = subprocess.run(
        command, env=environment(HOME="/root"), cwd="/proc", capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("baton up: no folder for temporary files can be written to, or all are ")
