"""`baton preflight`: what is missing is named, and blocks really move between processes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench.tools.processes import free_port
from cli.main import main
from cli.pods.preflight import findings
from cli.pods.preflight.blocks import BlockMover
from cli.pods.preflight.findings import MIB
from cli.pods.preflight.meeting import Meeting
from kv_transfer.transports.registry import create_transport
from process.store.embedded_valkey import EmbeddedValkey
from protocol.errors import ServiceError
from tests.paths import ROOT

SECRET = "a-secret-of-this-cluster"


@pytest.fixture(scope="module")
def valkey() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey() as running:
        yield running


def run_of(valkey: EmbeddedValkey, index: int, head_port: int) -> subprocess.Popen[str]:
    environ = {
        **os.environ,
        "BATON_REDIS_URL": valkey.url,
        "BATON_CLUSTER_SECRET": SECRET,
        "JOB_COMPLETION_INDEX": str(index),
    }
    command = [sys.executable, "-m", "cli.main", "preflight", "--preflight-run=pair"]
    command += ["--preflight-mib=4", "--device=cpu", "--wait-s=120"]
    command += ["--nnodes=2", "--tensor-parallel=2", "--master-addr=127.0.0.1"]
    command.append(f"--master-port={head_port}")
    return subprocess.Popen(command, cwd=ROOT, env=environ, text=True, stdout=subprocess.PIPE)


def test_two_processes_connect_as_ranks_and_move_blocks_to_each_other(
    valkey: EmbeddedValkey,
) -> None:
    port = free_port()
    processes = [run_of(valkey, index, port) for index in (0, 1)]
    texts = [process.communicate(timeout=240)[0] for process in processes]
    for process, text in zip(processes, texts, strict=True):
        assert process.returncode == 0, text
        assert "ok    store: answers in" in text
        assert "4 MiB at" in text
        assert "UCX may use" in text
    assert "ok    rank 0 to rank 1: 127.0.0.1:" in texts[0]
    assert f"ok    rank 1 to the head: 127.0.0.1:{port} answers in" in texts[1]


def meeting(valkey: EmbeddedValkey, run: str, secret: str = SECRET) -> Meeting:
    return Meeting(valkey.url, "test", run, secret)


def test_another_secret_is_found_before_anything_is_written(valkey: EmbeddedValkey) -> None:
    soon = time.monotonic() + 60
    with meeting(valkey, "a") as ours, meeting(valkey, "a", "of-another-cluster") as theirs:
        theirs.enter(1, "gpu-7", "agent", b"descriptor", 3)
        with pytest.raises(ServiceError, match="process 1 on gpu-7 has another cluster secret"):
            ours.wait_for(1, soon, lambda: None)
        ours.enter(0, "gpu-8", "agent", b"descriptor", 3)
        assert ours.wait_for(0, soon, lambda: None).descriptor == b"descriptor"


def test_a_process_that_does_not_come_is_named(valkey: EmbeddedValkey) -> None:
    turns: list[None] = []
    with meeting(valkey, "b") as ours:
        while len(turns) < 2:  # the transport must make progress meanwhile
            with pytest.raises(ServiceError, match="process 1 has not registered: is its pod"):
                ours.wait_for(1, time.monotonic() + 0.2, lambda: turns.append(None))
        assert not ours.wait_for_leave(1, time.monotonic() + 0.2, lambda: None)
        ours.leave(1)
        assert ours.wait_for_leave(1, time.monotonic() + 60, lambda: None)


def test_what_a_host_lacks_ends_the_check_before_others_are_waited_for(
    valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATON_REDIS_URL", valkey.url)
    monkeypatch.setenv("BATON_CLUSTER_SECRET", SECRET)
    flags = ["--preflight-run=c", "--device=cpu", "--kv-interface=mlx5_9:1"]
    assert main(["preflight", *flags]) == 1
    shown = capsys.readouterr()
    assert "FAIL  interfaces: mlx5_9:1 is not here, only " in shown.out
    assert "baton preflight: interfaces: see above" in shown.err


def test_a_store_that_does_not_answer_is_named() -> None:
    found = findings.check_store("redis://127.0.0.1:1/0")
    assert found.is_ok is False
    assert "its NetworkPolicy" in found.text
    assert findings.check_clock("redis://127.0.0.1:1/0").is_ok is None


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """/sys/class of a host with eth0 and an RDMA card with one port up and one down."""
    (tmp_path / "net/eth0").mkdir(parents=True)
    for port, state in (("1", "4: ACTIVE\n"), ("2", "1: DOWN\n")):
        folder = tmp_path / "infiniband/mlx5_0/ports" / port
        folder.mkdir(parents=True)
        (folder / "state").write_text(state)
    return tmp_path


def test_interfaces_must_exist_and_be_up(system: Path) -> None:
    assert findings.check_interfaces(["eth0", "mlx5_0:1"], system).is_ok
    down = findings.check_interfaces(["mlx5_0:2"], system)
    assert (down.is_ok, down.text) == (False, "mlx5_0:2 is 1: DOWN")
    missing = findings.check_interfaces(["mlx5_1:1"], system)
    assert missing.text.startswith("mlx5_1:1 is not here, only eth0, mlx5_0: ")


@pytest.mark.parametrize(
    ("names", "limit", "is_ok"),
    [
        (["mlx5_0:1"], 8 * MIB, False),
        (["mlx5_0:1"], 1024 * MIB, True),
        (["mlx5_0:1"], resource.RLIM_INFINITY, True),
        (["eth0"], 8 * MIB, True),
    ],
)
def test_rdma_needs_locked_memory(
    names: list[str], limit: int, is_ok: bool, system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    found = findings.check_locked_memory(names, 512 * MIB, system)
    assert found.is_ok is is_ok
    assert ("LimitMEMLOCK=infinity" in found.text) is (not is_ok)


def test_a_card_that_is_not_there_is_named() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a card")
    assert findings.check_card("cuda").is_ok is False
    assert findings.check_card("auto").is_ok


def test_blocks_that_are_damaged_are_found() -> None:
    with (
        BlockMover(create_transport("shm", "cpu"), 2, 2) as left,
        BlockMover(create_transport("shm", "cpu"), 2, 2) as right,
    ):
        right_end = right.transport
        left.transport.add_peer(right_end.agent, right_end.descriptor(), right.num_blocks)
        while right_end.agent not in left._connected:
            left.turn()
            right.turn()
        assert left._connected == {right_end.agent: None}
        assert right.damaged([0]) == [0]
        assert left.write(0, 1, right_end.agent, 60.0) > 0
        right.turn()
        assert right.damaged([0]) == []
        assert np.count_nonzero(right._blocks[:2]) == np.count_nonzero(right._blocks[4:]) == 0
        right._blocks[3, 12345] ^= 1
        assert right.damaged([0]) == [0]
