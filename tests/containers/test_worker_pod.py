"""A decode worker as in a pod: all addresses, fixed ports, probes, and a memory limit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests.containers.sandbox import (
    environment,
    in_group,
    in_namespaces,
    memory_group,
    needs_namespaces,
)
from tests.paths import DEMO_MODEL, ROOT

pytestmark = [pytest.mark.nightly, needs_namespaces()]

CARD = """
ip link set lo up
ip link add eth0 type veth peer name other
ip link set other up
ip link set eth0 up
ip addr add 10.9.8.7/24 dev eth0
ip route add default via 10.9.8.1
"""
MIB = 1 << 20


def run(command: Sequence[str]) -> dict[str, Any]:
    done = subprocess.run(
        command, env=environment(PATH="/usr/bin:/bin"), cwd=ROOT, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def worker(*flags: str) -> list[str]:
    script = str(ROOT / "tests/containers/pod_worker.py")
    return [sys.executable, script, f"--model={DEMO_MODEL}", "--torch-threads=1", *flags]


def test_a_worker_on_all_addresses_registers_the_pods() -> None:
    flags = (
        "--host=0.0.0.0",
        "--transport=nixl",
        "--kv-interface=eth0",
        "--allow-kv-over-tcp",
        "--kv-ports=41000-41003",
        "--control-port=7001",
        "--events-port=7002",
    )
    seen = run(in_namespaces(worker(*flags), CARD))
    assert seen["control"] == "tcp://10.9.8.7:7001"
    assert seen["events"] == "tcp://10.9.8.7:7002"
    *fixed, kv_port = seen["ports"]
    assert fixed == [7001, 7002, 9100]
    assert 41000 <= kv_port <= 41003
    assert seen["early"] == {"/startup": 503, "/ready": 503}
    assert seen["probes"] == {"/startup": 200, "/ready": 200, "/live": 200, "/x": 404}
    assert (seen["status"], seen["left"]) == (0, True)


def test_a_pool_fits_into_the_containers_limit() -> None:
    """The batch would need 4 GB; the pool is resident, and the kernel does not kill the worker."""
    flags = ("--max-batch-size=1024", "--memory-fraction=0.5")
    with memory_group(1200 * MIB) as group:
        seen = run(in_group(group, worker(*flags)))
    block_bytes = 16 << 10
    assert 100 * MIB < seen["num_blocks"] * block_bytes < 600 * MIB
    assert seen["status"] == 0
