"""Requests that make workers raise or die."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from protocol.messages import Role
from tests.effort import times
from tests.faults.faulty_fleet import FaultyFleet, Stream, faulty_fleet
from tests.faults.faulty_worker import DEADLY, DEADLY_LATER, POISON
from tests.integration.fleets import wait_for
from tests.integration.reference import NUM_TOKENS, Reference


@pytest.fixture(scope="module")
def fleet() -> Iterator[FaultyFleet]:
    with faulty_fleet(prefill=0, decode=times(1, 3)) as fleet:
        yield fleet


def test_a_poisonous_request_fails_alone_and_carries_its_id(
    fleet: FaultyFleet, long_prompts: list[Reference]
) -> None:
    """Others run in the very step that raises, on every worker."""
    good = [long_prompts[i % 3] for i in range(2 * len(fleet.names(Role.DECODE)))]
    fleet.arm(fleet.names(Role.DECODE), "decode", 3)
    streams = [Stream(fleet.url, list(each.prompt), NUM_TOKENS) for each in good]
    fleet.held("decode")
    poison = Stream(fleet.url, POISON * 20, 8)
    fleet.release_all()
    poison.wait()
    for stream, reference in zip(streams, good, strict=True):
        stream.wait()
        assert (stream.error, stream.tokens) == (None, list(reference.output))
    assert poison.error is not None
    assert poison.error.startswith("500 ")
    assert "cmpl-" in poison.error
    assert poison.tokens == []


@pytest.mark.nightly
def test_a_request_that_killed_two_workers_is_not_tried_on_a_third(fleet: FaultyFleet) -> None:
    fleet.revive()
    pids = fleet.pids
    deadly = Stream(fleet.url, DEADLY * 20, 8).wait()
    assert deadly.error is not None
    assert "2 workers died over it" in deadly.error
    # The router knows by their connections, which end before their processes have
    wait_for("two workers to end", lambda: len(fleet.names(Role.DECODE)) <= 1)
    assert len(fleet.names(Role.DECODE)) == 1
    fleet.revive()
    assert sum(pids[name] != pid for name, pid in fleet.pids.items()) == 2


@pytest.fixture(scope="module")
def pair() -> Iterator[FaultyFleet]:
    """A fleet whose prompts move."""
    with faulty_fleet(prefill=1, decode=3) as fleet:
        yield fleet


def test_a_poisonous_request_fails_alone_on_a_prefill_worker(
    pair: FaultyFleet, long_prompts: list[Reference]
) -> None:
    pair.arm(["prefill-1"], "chunk", 2)
    good = Stream(pair.url, list(long_prompts[0].prompt), NUM_TOKENS)
    pair.held("chunk")
    poison = Stream(pair.url, POISON * 20, 8)
    pair.release_all()
    poison.wait()
    assert poison.error is not None
    assert poison.error.startswith("500 ")
    assert "cmpl-" in poison.error
    good.wait()
    assert (good.error, good.tokens) == (None, list(long_prompts[0].output))


@pytest.mark.parametrize(
    ("kind", "victims"),
    [(DEADLY, {Role.PREFILL: 1, Role.DECODE: 1}), (DEADLY_LATER, {Role.DECODE: 2})],
    ids=["in any step", "in a decode step"],
)
def test_it_takes_no_third_worker_of_either_role(
    pair: FaultyFleet, kind: list[int], victims: dict[Role, int]
) -> None:
    """The first kills a prefill worker and then the decode worker that stood beside it; the second
    is given a new token by the prefill worker in every attempt."""
    pair.revive()
    pids = pair.pids
    roles = {name: child.role for name, child in pair.fleet.processes.items()}
    deadly = Stream(pair.url, kind * 20, 8).wait()
    assert deadly.error is not None
    assert "2 workers died over it" in deadly.error
    wait_for("two workers to end", lambda: len(pair.names(Role.DECODE)) == 3 - victims[Role.DECODE])
    pair.revive()
    killed = Counter(roles[name] for name, pid in pair.pids.items() if pids[name] != pid)
    assert killed == victims
