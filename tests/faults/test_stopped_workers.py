"""Workers that stand still until they are taken for dead, and then go on."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from protocol.messages import Role
from tests.faults.faulty_fleet import FaultyFleet, Stream, faulty_fleet
from tests.integration.fleets import counters, trace_of, wait_for, workers
from tests.integration.reference import NUM_TOKENS, Reference


@pytest.fixture(scope="module")
def fleet() -> Iterator[FaultyFleet]:
    with faulty_fleet(prefill=2, decode=2) as fleet:
        yield fleet


def stop_until_dead(fleet: FaultyFleet, name: str) -> None:
    fleet.signal(name, signal.SIGSTOP)
    wait_for(f"{name} to be taken for dead", lambda: not fleet.is_known(name))


def go_on(fleet: FaultyFleet, name: str) -> None:
    fleet.signal(name, signal.SIGCONT)
    fleet.revive()
    wait_for(
        f"{name} to say that it came back as another",
        lambda: workers(fleet.fleet)[name]["counters"].get("lapses"),
    )


def test_a_decode_worker_that_was_taken_for_dead(
    fleet: FaultyFleet, long_prompts: list[Reference]
) -> None:
    reference = long_prompts[0]
    pids = fleet.pids
    fleet.arm(fleet.names(Role.DECODE), "decode", 6)
    stream = Stream(fleet.url, list(reference.prompt), NUM_TOKENS)
    stopped = fleet.held("decode")
    stop_until_dead(fleet, stopped)
    stream.wait()
    assert (stream.error, stream.tokens) == (None, list(reference.output))
    go_on(fleet, stopped)  # with a step's token still to deliver, and tasks nobody wants
    assert fleet.pids == pids
    assert counters(fleet.fleet, stopped)["decode_tokens"] < 2 * NUM_TOKENS
    again = Stream(fleet.url, list(reference.prompt), NUM_TOKENS).wait()
    assert again.tokens == list(reference.output)


@pytest.mark.parametrize("point", ["chunk", "post"])
def test_a_prefill_worker_that_was_taken_for_dead_writes_nothing_any_more(
    fleet: FaultyFleet, long_prompts: list[Reference], point: str
) -> None:
    """Held just before it posts a write, stopped, and continued when its blocks are not its own
    to write any more: they stay fenced until it has said that it closed."""
    reference = long_prompts[2 if point == "chunk" else 3]
    fleet.arm(fleet.names(Role.PREFILL), point)
    stream = Stream(fleet.url, list(reference.prompt), NUM_TOKENS)
    stopped = fleet.held(point)
    stop_until_dead(fleet, stopped)
    stream.wait()
    assert (stream.error, stream.tokens) == (None, list(reference.output))
    attempts = trace_of(fleet.fleet, stream.request_id)["attempts"]
    decoder = attempts[-1]["decode"]["worker_id"]
    wait_for(
        "its blocks to be all that is fenced",
        lambda: workers(fleet.fleet)[decoder]["num_handoffs"] == 1,
    )
    sent = workers(fleet.fleet)[decoder]["counters"]["blocks_received"]
    go_on(fleet, stopped)
    wait_for("the fence to fall", lambda: not workers(fleet.fleet)[decoder]["num_handoffs"])
    assert counters(fleet.fleet, decoder)["blocks_received"] == sent, "nothing was written late"
