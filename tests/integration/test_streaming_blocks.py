"""Blocks leave while the next chunk computes, and only what is lacking moves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cli.fleet import Fleet
from tests.integration.fleets import all_counters, complete, counters, running_fleet, trace_of
from tests.integration.reference import BLOCK, Reference

CHUNK = 64
NUM_CHUNKS = 8


@pytest.fixture(scope="module", params=["nixl", "shm"])
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    with running_fleet(
        transport=request.param, chunk_max_tokens=CHUNK, local_prefill_threshold_tokens=0
    ) as fleet:
        yield fleet


@pytest.fixture
def prompts(references: list[Reference]) -> list[list[int]]:
    """Prompts of eight chunks with nothing in common."""
    tokens = list(max((r.prompt for r in references), key=len))
    return [[i, *tokens][: CHUNK * NUM_CHUNKS] for i in range(1, 13)]


def prefill_trace(fleet: Fleet, answer: dict[str, Any]) -> dict[str, Any]:
    trace = trace_of(fleet, answer["id"])
    assert trace["placement"]["mode"] == "remote"
    return trace["attempts"][-1]["prefill"]


def test_blocks_of_a_chunk_leave_before_the_next_chunk_ends(
    fleet: Fleet, prompts: list[list[int]]
) -> None:
    """Chunks of this model take 4 ms, so a machine that is busy with something else may hold up
    a thread for longer: of five prompts, one at least must go undisturbed."""
    complete(fleet, [5] * 40, max_tokens=2)  # the first handoff of a pair connects it
    traces = [prefill_trace(fleet, complete(fleet, prompt, max_tokens=4)) for prompt in prompts[:5]]
    late = [late_blocks(prefill) for prefill in traces]
    assert [0] * NUM_CHUNKS in late, f"blocks that left late, by chunk: {late}"


def late_blocks(prefill: dict[str, Any]) -> list[int]:
    """For each chunk, how many of its blocks were posted after the next one had ended.

    Everything is sent, once; so after the last chunk only that chunk's blocks can be to move.
    """
    chunk_ends = [end for _, end, _ in prefill["chunks"]]
    assert len(chunk_ends) == NUM_CHUNKS
    assert sum(num_blocks for _, _, num_blocks, _ in prefill["writes"]) == NUM_CHUNKS * (
        CHUNK // BLOCK
    )
    late = [0] * NUM_CHUNKS
    for posted, _done, num_blocks, chunk in prefill["writes"]:
        if chunk + 1 < NUM_CHUNKS and posted >= chunk_ends[chunk + 1]:
            late[chunk] += num_blocks
        assert chunk == NUM_CHUNKS - 1 or posted < prefill["writes"][-1][0]
    return late


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
