"""`bench.engine --served`: our server is measured, sleeps between two works, and leaves nothing."""

from __future__ import annotations

import random
from pathlib import Path

import psutil
import pytest

from bench.engine.served import ServedRun
from bench.engine.server_process import Server, baton_command
from bench.engine.workloads import EngineNeeds, Work
from tests.integration.fleets import assert_no_other_processes, our_processes
from tests.integration.reference import DEMO_MODEL

VOCAB = 2048
STOPPED = {psutil.STATUS_STOPPED}


def states(server: Server) -> set[str]:
    return {process.status() for process in server.processes()}


@pytest.mark.nightly
def test_a_server_is_measured_awake_and_sleeps_else(tmp_path: Path) -> None:
    before = our_processes()
    folder = tmp_path / "demo"
    folder.symlink_to(DEMO_MODEL)
    needs = EngineNeeds(folder, "float32", 1, 1024, 2, 4096, 0, 512)
    with Server(baton_command(needs), needs) as server:
        assert states(server) == STOPPED
        assert len(server.processes()) >= 4, "baton up, a router, a worker, a Valkey"
        run = ServedRun(server, VOCAB, stream_tokens=512)
        for turn in range(2):
            for work in (Work("prefill", 1, 64), Work("decode", 2, 16)):
                assert run.measure(work, random.Random(turn)) > 0.0
                assert states(server) == STOPPED
    assert_no_other_processes(before)
