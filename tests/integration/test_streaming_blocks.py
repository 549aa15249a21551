"""Blocks leave while the next chunk computes, and only what is lacking moves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cli.fleet import Fleet
from tests.effort import some
from tests.faults.faulty_fleet import FaultyFleet, Stream, faulty_fleet
from tests.integration.fleets import (
    PATIENCE,
    all_counters,
    complete,
    counters,
    trace_of,
    wait_for,
    workers,
)
from tests.integration.reference import BLOCK, Reference

CHUNK = 64
NUM_CHUNKS = 8


@pytest.fixture(scope="module", params=some(["nixl", "shm"], 1))
def held(request: pytest.FixtureRequest) -> Iterator[FaultyFleet]:
    """A fleet whose prefill worker may be held at the end of a chunk."""
    with faulty_fleet(PATIENCE, transport=request.param, chunk_max_tokens=CHUNK) as fleet:
        yield fleet


@pytest.fixture
def fleet(held: FaultyFleet) -> Fleet:
    return held.fleet


@pytest.fixture
def prompts(references: list[Reference]) -> list[list[int]]:
    """Prompts of eight chunks with nothing in common."""
    tokens = list(max((r.prompt for r in references), key=len))
    return [[i, *tokens][: CHUNK * NUM_CHUNKS] for i in range(1, 13)]


def test_blocks_of_a_chunk_leave_before_the_next_chunk_ends(
    held: FaultyFleet, fleet: Fleet, prompts: list[list[int]]
) -> None:
    """The prefill worker is held at the end of each chunk, until all blocks of the chunks before
    it have arrived."""
    complete(fleet, prompts[1][:CHUNK], max_tokens=2)  # the pair gets to know each other
    before = counters(fleet, "decode-1")["blocks_received"]

    def num_arrived() -> int:
        return workers(fleet)["decode-1"]["counters"].get("blocks_received", 0) - before

    held.arm(["prefill-1"], "chunk", 1)
    stream = Stream(fleet.url, prompts[0], 4)
    assert held.held("chunk") == "prefill-1"
    held.compute_until_granted("prefill-1")
    for chunk in range(4, NUM_CHUNKS + 1):  # it was granted blocks in chunk 2 or before
        held.move_on("prefill-1", "chunk", chunk)
        num_blocks = (chunk - 1) * CHUNK // BLOCK
        wait_for(f"{num_blocks} blocks", lambda n=num_blocks: num_arrived() == n)
    held.release("prefill-1", "chunk")
    assert stream.wait().error is None
    trace = trace_of(fleet, stream.request_id)
    assert trace["placement"]["mode"] == "remote"
    prefill = trace["attempts"][-1]["prefill"]
    assert len(prefill["chunks"]) == NUM_CHUNKS
    assert sum(num_blocks for _, _, num_blocks, _ in prefill["writes"]) == NUM_CHUNKS * (
        CHUNK // BLOCK
    ), "everything is sent, once"


def test_what_both_workers_hold_is_not_sent_again(fleet: Fleet, prompts: list[list[int]]) -> None:
    complete(fleet, prompts[0], max_tokens=4)
    before = all_counters(fleet)
    answer = complete(fleet, prompts[0], max_tokens=4)
    after = all_counters(fleet)
    assert after["prefill-1"]["blocks_sent"] == before["prefill-1"]["blocks_sent"]
    assert after["decode-1"]["blocks_received"] == before["decode-1"]["blocks_received"]
    # One block is computed again, to have the logits of the last token.
    computed = {
        name: after[name]["prefill_tokens"] - before[name]["prefill_tokens"] for name in after
    }
    assert sum(computed.values()) == BLOCK
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompts[0]) - BLOCK


def test_only_the_blocks_that_are_lacking_move(fleet: Fleet, prompts: list[list[int]]) -> None:
    complete(fleet, prompts[0], max_tokens=4)
    before = counters(fleet, "decode-1")["blocks_received"]
    longer = prompts[0] + prompts[0][1:200]
    complete(fleet, longer, max_tokens=4)
    lacking = -(-len(longer) // BLOCK) - len(prompts[0]) // BLOCK
    assert counters(fleet, "decode-1")["blocks_received"] - before == lacking
