"""A request whose deadline passes ends with a clear error, and makes room for others at once.

The pools hold one long prompt. Workers are held until the deadline has passed, and what they do
afterwards is counted.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.effort import some
from tests.faults.faulty_fleet import FaultyFleet, Stream, faulty_fleet
from tests.integration.fleets import counters, wait_for, workers
from tests.integration.reference import BLOCK, NUM_TOKENS, Reference

CHUNK = 64
LONGEST = 513
NUM_BLOCKS = -(-(LONGEST + NUM_TOKENS) // BLOCK)
NUM_STEPS = 5
TIMEOUT_S = 6
SETTINGS = {"BATON_SILENCE_S": "60", "BATON_PEER_SILENCE_S": "60"}
"""So that a worker that is held for longer is still given requests."""


@pytest.fixture(scope="module", params=some(["nixl", "shm"], 1))
def fleet(request: pytest.FixtureRequest) -> Iterator[FaultyFleet]:
    with faulty_fleet(
        SETTINGS,
        prefill=1,
        decode=1,
        num_blocks=NUM_BLOCKS,
        chunk_max_tokens=CHUNK,
        transport=request.param,
    ) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def prompts(long_prompts: list[Reference]) -> list[Reference]:
    """Any one fits into a pool, no two do."""
    return [each for each in long_prompts if len(each.prompt) <= LONGEST]


def test_while_it_decodes(fleet: FaultyFleet, prompts: list[Reference]) -> None:
    before = counters(fleet.fleet, "decode-1")["decode_tokens"]
    fleet.arm(["decode-1"], "decode", NUM_STEPS)
    late = start(fleet, prompts[0], TIMEOUT_S)
    fleet.held("decode")
    assert_late(late)
    fleet.wait_heard("decode-1", "Abort")
    other = start(fleet, prompts[1])
    fleet.release("decode-1", "decode")
    assert_whole(other, prompts[1])
    produced = counters(fleet.fleet, "decode-1")["decode_tokens"] - before - NUM_TOKENS
    assert NUM_STEPS + 1 <= produced <= NUM_STEPS + 2  # with the first token, from elsewhere


def test_while_it_receives_blocks_and_while_it_waits_for_them(
    fleet: FaultyFleet, prompts: list[Reference]
) -> None:
    """The first one's blocks stay fenced until its prefill worker has closed; so the second one
    waits in vain, too, and the third until then."""
    before = counters(fleet.fleet, "prefill-1")["prefill_tokens"]
    fleet.arm(["prefill-1"], "chunk")
    receiving = start(fleet, prompts[2], TIMEOUT_S)
    fleet.held("chunk")
    fleet.compute_until_granted("prefill-1")
    waiting = start(fleet, prompts[3], TIMEOUT_S)
    wait_for("it to wait for blocks", lambda: shown(fleet)["num_waiting"] == 1)
    assert_late(receiving)
    assert_late(waiting)
    wait_for("it to be forgotten", lambda: shown(fleet)["num_waiting"] == 0)
    assert shown(fleet)["num_handoffs"] == 1
    assert shown(fleet)["blocks_used"] == -(-len(prompts[2].prompt) // BLOCK), "they are fenced"
    other = start(fleet, prompts[4])
    wait_for("it to wait for blocks", lambda: shown(fleet)["num_waiting"] == 1)
    fleet.wait_heard("prefill-1", "Abort")
    fleet.release("prefill-1", "chunk")
    assert_whole(other, prompts[4])
    computed = counters(fleet.fleet, "prefill-1")["prefill_tokens"] - before
    computed -= len(prompts[4].prompt)
    assert 0 < computed < len(prompts[2].prompt), "of the first one; of the second one nothing"


def test_while_a_write_to_its_blocks_is_about_to_land(
    fleet: FaultyFleet, prompts: list[Reference]
) -> None:
    """Nothing can call that write back, so it lands late: behind the fence."""
    fleet.arm(["prefill-1"], "landing", 2)
    late = start(fleet, prompts[5], TIMEOUT_S)
    fleet.held("landing")
    assert_late(late)
    other = start(fleet, prompts[0])
    wait_for("it to wait for blocks", lambda: shown(fleet)["num_waiting"] == 1)
    assert shown(fleet)["num_handoffs"] == 1
    assert shown(fleet)["blocks_used"] == -(-len(prompts[5].prompt) // BLOCK), "they are fenced"
    before = workers(fleet.fleet)["prefill-1"]["counters"]["blocks_sent"]
    fleet.release("prefill-1", "landing")
    assert_whole(other, prompts[0])
    landed = counters(fleet.fleet, "prefill-1")["blocks_sent"] - before
    assert landed > -(-len(prompts[0].prompt) // BLOCK), "those of the other, and late ones"


def start(fleet: FaultyFleet, reference: Reference, timeout_s: int = 60) -> Stream:
    headers = {"x-request-timeout-ms": str(1000 * timeout_s)}
    return Stream(fleet.url, list(reference.prompt), NUM_TOKENS, headers=headers)


def shown(fleet: FaultyFleet) -> dict[str, int]:
    """The decode worker's last report."""
    return workers(fleet.fleet)["decode-1"]


def assert_late(stream: Stream) -> None:
    stream.wait()
    assert stream.error is not None
    assert "deadline" in stream.error


def assert_whole(stream: Stream, reference: Reference) -> None:
    stream.wait()
    assert (stream.error, stream.tokens) == (None, list(reference.output))
