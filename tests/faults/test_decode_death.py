"""A decode worker dies in mid-stream: the stream goes on elsewhere, or when another is there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from protocol.messages import Role
from tests.effort import some
from tests.faults.faulty_fleet import FaultyFleet, Stream, faulty_fleet
from tests.integration.fleets import trace_of, wait_for, workers
from tests.integration.reference import NUM_TOKENS, Reference

WRITING = {
    "between chunks": ("chunk", 1, False),
    "before the last blocks, after the first token": ("post", 2, True),
    "after a write, after the first token": ("posted", 2, True),
    "as the last write begins": ("landing", 1, True),
}
"""Where the prefill worker is held, at which pass, and whether its first token is out."""


@pytest.fixture(scope="module", params=some(["nixl", "shm"], 1))
def fleet(request: pytest.FixtureRequest) -> Iterator[FaultyFleet]:
    with faulty_fleet(prefill=1, decode=2, transport=request.param) as fleet:
        yield fleet


@pytest.mark.parametrize("steps", some([9, 1], 1))
def test_the_stream_goes_on_where_it_broke_off(
    fleet: FaultyFleet, long_prompts: list[Reference], steps: int
) -> None:
    fleet.revive()
    reference = long_prompts[steps % 2]
    fleet.arm(fleet.names(Role.DECODE), "decode", steps)
    stream = Stream(fleet.url, list(reference.prompt), NUM_TOKENS)
    killed = fleet.held("decode")
    stream.wait_tokens(steps)  # the first comes from the prefill worker, that of this step is held
    before = list(stream.tokens)
    fleet.kill(killed)
    stream.wait()
    assert before == list(reference.output[: len(before)])
    assert (stream.error, stream.tokens) == (None, list(reference.output))
    attempts = trace_of(fleet.fleet, stream.request_id)["attempts"]
    assert [each["decode"] is None for each in attempts] == [True, False]


def test_it_dies_before_it_grants_its_blocks(
    fleet: FaultyFleet, long_prompts: list[Reference]
) -> None:
    fleet.revive()
    reference = long_prompts[4]
    fleet.arm(fleet.names(Role.DECODE), "offer")
    stream = Stream(fleet.url, list(reference.prompt), NUM_TOKENS)
    fleet.kill(fleet.held("offer"))
    stream.wait()
    assert (stream.error, stream.tokens) == (None, list(reference.output))


@pytest.mark.parametrize("moment", some(WRITING, 2))
def test_it_dies_while_its_blocks_are_being_written(
    fleet: FaultyFleet,
    long_prompts: list[Reference],
    one_chunk_prompts: list[Reference],
    moment: str,
) -> None:
    """The prefill worker goes on to write into a pool that is gone, and then into another."""
    fleet.revive()
    point, passes, has_first_token = WRITING[moment]
    reference = (
        one_chunk_prompts[0]
        if point == "landing"
        else long_prompts[8 + list(WRITING).index(moment)]
    )
    fleet.arm(["prefill-1"], point, passes)
    stream = Stream(fleet.url, list(reference.prompt), NUM_TOKENS)
    fleet.held(point)
    if point == "chunk":
        fleet.compute_until_granted("prefill-1")
    (receiving,) = wait_for(
        "the handoff to be shown",
        lambda: [name for name in fleet.names(Role.DECODE) if handoffs_of(fleet, name)],
    )
    if has_first_token:
        stream.wait_tokens(1)
    fleet.kill(receiving)
    fleet.release("prefill-1", point)
    stream.wait()
    assert (stream.error, stream.tokens) == (None, list(reference.output))


def handoffs_of(fleet: FaultyFleet, name: str) -> int:
    """Open handoffs of a worker, by its last report."""
    return workers(fleet.fleet).get(name, {}).get("num_handoffs", 0)


def test_without_another_decode_worker_the_stream_waits_for_one(
    fleet: FaultyFleet, long_prompts: list[Reference]
) -> None:
    fleet.revive()
    fleet.kill("decode-2")
    wait_for("the router to notice", lambda: not fleet.is_known("decode-2"))
    reference = long_prompts[2]
    fleet.arm(["decode-1"], "decode", 5)
    stream = Stream(fleet.url, list(reference.prompt), NUM_TOKENS)
    assert fleet.held("decode") == "decode-1"
    stream.wait_tokens(5)
    fleet.kill("decode-1")
    fleet.revive()
    stream.wait()
    assert (stream.error, stream.tokens) == (None, list(reference.output))


def test_both_legs_of_a_request_may_die_at_once(
    fleet: FaultyFleet, long_prompts: list[Reference]
) -> None:
    fleet.revive()
    reference = long_prompts[3]
    fleet.arm(["prefill-1"], "chunk", 2)
    stream = Stream(fleet.url, list(reference.prompt), NUM_TOKENS)
    fleet.held("chunk")
    fleet.kill("prefill-1", "decode-1")
    stream.wait()
    assert (stream.error, stream.tokens) == (None, list(reference.output))


def test_it_dies_between_chunks_that_it_computes_itself(
    fleet: FaultyFleet, long_prompts: list[Reference]
) -> None:
    fleet.revive()
    fleet.kill("prefill-1")
    wait_for("the router to notice", lambda: not fleet.is_known("prefill-1"))
    reference = long_prompts[7]
    fleet.arm(fleet.names(Role.DECODE), "chunk", 3)
    stream = Stream(fleet.url, list(reference.prompt), NUM_TOKENS)
    fleet.kill(fleet.held("chunk"))
    stream.wait()
    assert (stream.error, stream.tokens) == (None, list(reference.output))
