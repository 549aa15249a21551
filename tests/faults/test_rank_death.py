"""A rank of a worker dies, or its worker does: the stream goes on elsewhere, and nothing stays."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import psutil
import pytest

from protocol.messages import Role
from tests.effort import some
from tests.faults.faulty_fleet import FaultyFleet, Stream, faulty_fleet
from tests.integration.fleets import wait_for
from tests.integration.reference import NUM_TOKENS, Reference


@pytest.fixture(scope="module", params=some([(1, 2), (2, 1), (2, 2)], 1), ids=str)
def fleet(request: pytest.FixtureRequest) -> Iterator[FaultyFleet]:
    """Each decode worker has so many ranks in so many stages."""
    ranks, stages = request.param
    split = {"decode_tensor_parallel": ranks, "decode_pipeline_parallel": stages}
    with faulty_fleet(prefill=0, decode=2, transport="nixl", **split) as fleet:
        yield fleet


def hands_of(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children()
    return [each for each in children if "worker.ranks.hand" in each.cmdline()]


@pytest.mark.parametrize("dies", some(["its hand", "its head"], 1))
def test_the_stream_goes_on_where_it_broke_off(
    fleet: FaultyFleet, long_prompts: list[Reference], dies: str
) -> None:
    fleet.revive()
    reference = long_prompts[0]
    fleet.arm(fleet.names(Role.DECODE), "decode", 5)
    stream = Stream(fleet.url, list(reference.prompt), NUM_TOKENS)
    held = fleet.held("decode")
    stream.wait_tokens(4)
    hands = hands_of(fleet.pids[held])
    assert hands
    if dies == "its hand":
        hands[-1].kill()
        assert fleet.fleet.processes[held].wait(60)
    else:
        fleet.kill(held)
    stream.wait()
    assert (stream.error, stream.tokens) == (None, list(reference.output))
    wait_for("the hands to be gone", lambda: not any(each.is_running() for each in hands))
    if dies == "its hand":
        last, size = len(hands), 1 + len(hands)
        told = fleet.fleet.processes[held].log_tail(20)
        assert f"rank {last} of {size} has ended by signal 9" in told


def test_a_worker_that_is_told_to_stop_ends_its_hands_in_order(fleet: FaultyFleet) -> None:
    fleet.revive()
    hands = hands_of(fleet.pids["decode-1"])
    fleet.signal("decode-1", signal.SIGTERM)
    assert fleet.fleet.processes["decode-1"].wait(60)
    assert fleet.fleet.processes["decode-1"].exit_status() == 0
    assert hands
    assert not any(each.is_running() for each in hands)
