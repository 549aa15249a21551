"""Workers that stand still until they are taken for dead, and then go on."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from protocol.messages import Role
from tests.effort import some
from tests.faults.faulty_fleet import FaultyFleet, Stream, faulty_fleet
from tests.integration.fleets import (
    all_counters,
    assert_idle,
    counters,
    trace_of,
    wait_for,
    workers,
)
from tests.integration.reference import BLOCK, NUM_TOKENS, Reference


@pytest.fixture(scope="module", params=some(["nixl", "shm"], 1))
def fleet(request: pytest.FixtureRequest) -> Iterator[FaultyFleet]:
    with faulty_fleet(prefill=2, decode=2, transport=request.param) as fleet:
        yield fleet


def stop_until_dead(fleet: FaultyFleet, name: str) -> int:
    """How often it had come back as another before."""
    former = lapses(fleet, name)
    fleet.signal(name, signal.SIGSTOP)
    wait_for(f"{name} to be taken for dead", lambda: not fleet.is_known(name))
    return former


def go_on(fleet: FaultyFleet, name: str, former: int) -> None:
    fleet.signal(name, signal.SIGCONT)
    fleet.revive()
    wait_for(f"{name} to come back as another", lambda: lapses(fleet, name) > former)


def lapses(fleet: FaultyFleet, name: str) -> int:
    return workers(fleet.fleet)[name]["counters"].get("lapses", 0)


def test_a_decode_worker_that_was_taken_for_dead(
    fleet: FaultyFleet, long_prompts: list[Reference]
) -> None:
    reference = long_prompts[0]
    pids = fleet.pids
    steps = 6
    before = all_counters(fleet.fleet)
    fleet.arm(fleet.names(Role.DECODE), "decode", steps)
    stream = Stream(fleet.url, list(reference.prompt), NUM_TOKENS)
    stopped = fleet.held("decode")
    log = fleet.fleet.processes[stopped].log_path
    noted = log.read_text().count("the lease of")
    former = stop_until_dead(fleet, stopped)
    stream.wait()
    assert (stream.error, stream.tokens) == (None, list(reference.output))
    fleet.signal(stopped, signal.SIGCONT)
    wait_for("it to notice that it lapsed", lambda: log.read_text().count("the lease of") > noted)
    go_on(fleet, stopped, former)  # with a step's token still to deliver, and tasks nobody wants
    assert fleet.pids == pids
    produced = counters(fleet.fleet, stopped)["decode_tokens"] - before[stopped]["decode_tokens"]
    assert produced == steps + 1, "with the first, and that of the step in which it stood"
    again = Stream(fleet.url, list(reference.prompt), NUM_TOKENS).wait()
    assert again.tokens == list(reference.output)


def receivers(fleet: FaultyFleet) -> list[str]:
    """Decode workers that have granted blocks."""
    shown = workers(fleet.fleet).items()
    return [n for n, each in shown if each["role"] == "decode" and each["num_handoffs"]]


def test_a_decode_worker_that_was_taken_for_dead_while_it_was_written_to(
    fleet: FaultyFleet, long_prompts: list[Reference]
) -> None:
    """All that was for it comes while it stands: it drops that, and keeps no blocks."""
    reference = long_prompts[4]
    pids = fleet.pids
    fleet.arm(fleet.names(Role.PREFILL), "chunk", 3)
    stream = Stream(fleet.url, list(reference.prompt), NUM_TOKENS)
    writing = fleet.held("chunk")
    (receiving,) = wait_for("the handoff to be shown", lambda: receivers(fleet))
    former = lapses(fleet, receiving)
    fleet.signal(receiving, signal.SIGSTOP)
    fleet.release(writing, "chunk")
    wait_for(f"{receiving} to be taken for dead", lambda: not fleet.is_known(receiving))
    stream.wait()
    assert (stream.error, stream.tokens) == (None, list(reference.output))
    go_on(fleet, receiving, former)
    assert_idle(fleet.fleet)
    assert fleet.pids == pids
    again = Stream(fleet.url, list(reference.prompt), NUM_TOKENS).wait()
    assert again.tokens == list(reference.output)


def test_a_prefill_worker_that_was_taken_for_dead_in_the_middle_of_a_write(
    fleet: FaultyFleet, long_prompts: list[Reference]
) -> None:
    """It was posted in time, and lands late: behind the fence."""
    reference = long_prompts[5]
    fleet.arm(fleet.names(Role.PREFILL), "landing", 2)
    stream = Stream(fleet.url, list(reference.prompt), NUM_TOKENS)
    stopped = fleet.held("landing")
    former = stop_until_dead(fleet, stopped)
    stream.wait()
    assert (stream.error, stream.tokens) == (None, list(reference.output))
    decoder = fleet.attempts(stream.request_id)[-1]["decode"]["worker_id"]
    num_blocks = -(-len(reference.prompt) // BLOCK)

    def is_fenced() -> bool:
        shown = workers(fleet.fleet)[decoder]
        return (shown["num_handoffs"], shown["blocks_used"]) == (1, num_blocks)

    wait_for("its blocks to be all that is in use", is_fenced)
    go_on(fleet, stopped, former)
    assert_idle(fleet.fleet)
    again = Stream(fleet.url, list(reference.prompt), NUM_TOKENS).wait()
    assert again.tokens == list(reference.output)


@pytest.mark.parametrize("point", some(["chunk", "post"], 1))
def test_a_prefill_worker_that_was_taken_for_dead_writes_nothing_any_more(
    fleet: FaultyFleet, long_prompts: list[Reference], point: str
) -> None:
    """Held just before it posts a write, stopped, and continued when its blocks are not its own
    to write any more: they stay fenced until it has said that it closed."""
    reference = long_prompts[2 if point == "chunk" else 3]
    fleet.arm(fleet.names(Role.PREFILL), point)
    stream = Stream(fleet.url, list(reference.prompt), NUM_TOKENS)
    stopped = fleet.held(point)
    if point == "chunk":
        fleet.compute_until_granted(stopped)
    former = stop_until_dead(fleet, stopped)
    stream.wait()
    assert (stream.error, stream.tokens) == (None, list(reference.output))
    attempts = trace_of(fleet.fleet, stream.request_id)["attempts"]
    decoder = attempts[-1]["decode"]["worker_id"]
    ended_us = time.time_ns() // 1000

    def fenced() -> dict[str, Any] | None:
        shown = workers(fleet.fleet)[decoder]
        is_new = shown["reported_us"] > ended_us
        return shown if is_new and shown["num_handoffs"] == 1 else None

    shown = wait_for("its blocks to be all that is fenced", fenced)
    sent = shown["counters"]["blocks_received"]
    go_on(fleet, stopped, former)
    wait_for("the fence to fall", lambda: not workers(fleet.fleet)[decoder]["num_handoffs"])
    assert counters(fleet.fleet, decoder)["blocks_received"] == sent, "nothing was written late"
