"""The store goes away and comes back empty: nobody who serves or is served notices, also not when
workers die meanwhile."""

from __future__ import annotations

import os
import signal

from process.store.fleet_watcher import read_fleet
from protocol.messages import Role
from tests.faults.faulty_fleet import Stream, faulty_fleet
from tests.integration.fleets import wait_for, workers
from tests.integration.reference import NUM_TOKENS, Reference


def test_streams_go_on_and_new_requests_are_served(long_prompts: list[Reference]) -> None:
    with faulty_fleet(prefill=2, decode=2) as fleet:
        valkey = fleet.fleet.valkey
        assert valkey is not None
        pids = fleet.pids
        reference = long_prompts[0]
        fleet.arm(fleet.names(Role.DECODE), "decode", 5)
        running = Stream(fleet.url, list(reference.prompt), NUM_TOKENS)
        held = fleet.held("decode")
        os.kill(valkey.pid, signal.SIGKILL)
        wait_for("it to end", lambda: valkey.exit_status() is not None)
        fleet.release(held, "decode")
        running.wait()
        assert (running.error, running.tokens) == (None, list(reference.output))
        for other in long_prompts[1:4]:
            stream = Stream(fleet.url, list(other.prompt), NUM_TOKENS).wait()
            assert (stream.error, stream.tokens) == (None, list(other.output))
        fleet.arm(fleet.names(Role.PREFILL), "chunk", 3)
        stream = Stream(fleet.url, list(long_prompts[5].prompt), NUM_TOKENS)
        fleet.kill(fleet.held("chunk"))
        stream.wait()
        assert (stream.error, stream.tokens) == (None, list(long_prompts[5].output))
        fleet.arm(fleet.names(Role.DECODE), "decode", 3)
        stream = Stream(fleet.url, list(long_prompts[6].prompt), NUM_TOKENS)
        fleet.kill(fleet.held("decode"))
        stream.wait()
        assert (stream.error, stream.tokens) == (None, list(long_prompts[6].output))
        pids = {name: pid for name, pid in pids.items() if fleet.fleet.processes[name].is_running()}
        valkey.restart()
        wait_for(
            "all to register again",
            lambda: read_fleet(fleet.fleet.redis_url, "default").keys() == pids.keys() - {"router"},
        )
        stream = Stream(fleet.url, list(long_prompts[4].prompt), NUM_TOKENS).wait()
        assert stream.tokens == list(long_prompts[4].output)
        assert {name: fleet.pids[name] for name in pids} == pids
        assert all(not each["counters"].get("lapses") for each in workers(fleet.fleet).values())
