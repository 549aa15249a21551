"""Prefill workers that hold their lease and answer nothing, as if the way to them were cut.

A worker that is held at a fault point hears and says nothing; its process and its lease live on.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from protocol.messages import Role
from tests.effort import some
from tests.faults.faulty_fleet import FaultyFleet, Stream, faulty_fleet
from tests.http_client import HTTP
from tests.integration.fleets import assert_idle, trace_of, wait_for, workers
from tests.integration.reference import BLOCK, NUM_TOKENS, Reference

SILENCE = {"BATON_PEER_SILENCE_S": "5", "BATON_KV_FETCH": "off", "BATON_LEASE_S": "60"}
"""Without fetches the silent worker is granted every block of its prompt. A silent worker whose
lease lapses, as it may on a busy machine, counts as gone, and nothing of it is fenced for long."""
CHUNK = 64


@pytest.fixture(scope="module", params=some(["nixl", "shm"], 1))
def fleet(request: pytest.FixtureRequest) -> Iterator[FaultyFleet]:
    with faulty_fleet(
        SILENCE, prefill=2, decode=1, chunk_max_tokens=CHUNK, transport=request.param
    ) as fleet:
        yield fleet


@pytest.mark.parametrize(("number", "point"), some([(3, "chunk"), (1, "grant")], 1))
def test_what_it_owes_comes_from_another_and_what_it_writes_late_lands_behind_the_fence(
    fleet: FaultyFleet, long_prompts: list[Reference], number: int, point: str
) -> None:
    reference, other = long_prompts[number : number + 2]
    fleet.arm(fleet.names(Role.PREFILL), point, 1)
    stream = Stream(fleet.url, list(reference.prompt), NUM_TOKENS)
    silent = fleet.held(point)
    if point == "chunk":
        fleet.compute_until_granted(silent)
    stream.wait()
    assert (stream.error, stream.tokens) == (None, list(reference.output))
    first, *_, retry = trace_of(fleet.fleet, stream.request_id)["attempts"]
    noticed = ("has fallen silent", "the source is gone")  # its connection may break first
    assert any(each in first["failed"] for each in noticed)
    assert retry["prefill"]["worker_id"] != silent
    assert_fenced(fleet, reference)
    stream = Stream(fleet.url, list(other.prompt), NUM_TOKENS).wait()
    assert (stream.error, stream.tokens) == (None, list(other.output))
    assert_fenced(fleet, reference)
    fleet.release(silent, point)
    assert_idle(fleet.fleet)
    for each in (reference, other):
        again = Stream(fleet.url, list(each.prompt), NUM_TOKENS).wait()
        assert again.tokens == list(each.output), "a cached block was written to"


def test_its_late_token_is_dropped(fleet: FaultyFleet, long_prompts: list[Reference]) -> None:
    """It comes over a connection that stands, from a worker in good standing, for a request that
    runs: it is of an attempt that has ended."""
    reference = long_prompts[0]
    last_chunk = -(-len(reference.prompt) // CHUNK)
    fleet.arm(fleet.names(Role.PREFILL), "chunk", last_chunk)
    fleet.arm(["decode-1"], "decode", 3)
    stream = Stream(fleet.url, list(reference.prompt), NUM_TOKENS)
    silent = fleet.held("chunk")
    assert fleet.held("decode") == "decode-1", "the second attempt runs"
    stream.wait_tokens(3)
    before = num_stale(fleet)
    fleet.release(silent, "chunk")
    wait_for("its token to be dropped", lambda: num_stale(fleet) > before)
    fleet.release("decode-1", "decode")
    stream.wait()
    assert (stream.error, stream.tokens) == (None, list(reference.output))


def assert_fenced(fleet: FaultyFleet, reference: Reference) -> None:
    """The blocks of the first attempt at a prompt are in use, and no others."""
    num_blocks = -(-len(reference.prompt) // BLOCK)

    def is_so() -> bool:
        shown = workers(fleet.fleet)["decode-1"]
        return (shown["num_handoffs"], shown["blocks_used"]) == (1, num_blocks)

    wait_for("its blocks alone to be in use", is_so)


def num_stale(fleet: FaultyFleet) -> float:
    """Messages of ended attempts that the router has dropped."""
    metrics = HTTP.get(f"{fleet.url}/metrics").raise_for_status().text
    name = "baton_router_stale_messages_total "
    return sum(float(line[len(name) :]) for line in metrics.splitlines() if line.startswith(name))
