"""The way of KV between two workers breaks while both live: the request goes another way, and the
next ones move blocks between these workers again."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from bench.reliability.connection_cut import can_cut, connections_of, cut
from bench.reliability.socket_shutdown import shut_down_between
from cli.fleet import Fleet
from protocol.messages import Role
from tests.effort import times
from tests.faults.faulty_fleet import FaultyFleet, Stream, faulty_fleet
from tests.integration.fleets import all_counters, complete, running_fleet, workers
from tests.integration.reference import BLOCK, NUM_TOKENS, Reference

P, D = "prefill-1", "decode-1"
CUTS = times(1, 20)


@pytest.fixture
def deaf() -> Iterator[FaultyFleet]:
    """NIXL uses TCP here, whose listener can be taken away."""
    with faulty_fleet({"UCX_TLS": "tcp,self"}, prefill=1, decode=1, transport="nixl") as fleet:
        yield fleet


def test_a_pair_whose_transport_has_died_is_made_anew(
    deaf: FaultyFleet, references: list[Reference]
) -> None:
    """Connecting again does not help: the decode worker's transport can be reached no more."""
    prompts = iter([each for each in references if len(each.prompt) > 10 * BLOCK])
    pids = deaf.pids

    def blocks_moved() -> int:
        """Between the two workers for a new prompt, whose answer is right."""
        before = all_counters(deaf.fleet)[P]["blocks_sent"]
        reference = next(prompts)
        stream = Stream(deaf.url, list(reference.prompt), NUM_TOKENS).wait()
        assert (stream.error, stream.tokens) == (None, list(reference.output))
        return all_counters(deaf.fleet)[P]["blocks_sent"] - before

    assert blocks_moved() > 0
    deaf.spoil(Role.DECODE, "deaf")
    deaf.spoilt("deaf")
    moved = [blocks_moved() for _ in range(5)]
    assert moved[0] == 0, "it was not deaf"
    assert moved[-1] > 0, "the pair has not found together again"
    assert deaf.pids == pids


@pytest.fixture(scope="module", params=["nixl", "shm"])
def pair(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """NIXL uses TCP here, whose connections can be cut."""
    if request.param == "nixl" and not can_cut():
        pytest.skip("TCP connections cannot be cut here")
    settings = {"transport": request.param, "local_prefill_threshold_tokens": 0}
    with running_fleet({"UCX_TLS": "tcp,self"}, prefill=1, decode=1, **settings) as fleet:
        yield fleet


def cut_data_path(fleet: Fleet) -> int:
    """Break the connections between the two workers that carry KV; returns their number."""
    pids = {name: fleet.processes[name].pid for name in (P, D)}
    shown = workers(fleet)
    if shown[P]["transport"] == "shm":
        return shut_down_between(pids[P], pids[D])
    control = {int(each["control"].rpartition(":")[2]) for each in shown.values()}
    return sum(
        cut(connection)
        for one, other in ((P, D), (D, P))
        for connection in connections_of(pids[one], ports_of(pids[other]) - control)
        if connection[0][1] not in control
    )


def ports_of(pid: int) -> set[int]:
    """The local ports of all connections of a process."""
    return {each.laddr.port for each in psutil.Process(pid).net_connections("tcp") if each.laddr}


def test_requests_go_another_way_and_the_pair_is_used_again(
    pair: Fleet, references: list[Reference]
) -> None:
    prompts = iter([each for each in references if len(each.prompt) > 10 * BLOCK])

    def answer() -> int:
        """Blocks that move between the two workers for a new prompt, whose answer is right."""
        before = all_counters(pair)[P]["blocks_sent"]
        reference = next(prompts)
        answered = complete(pair, list(reference.prompt), max_tokens=NUM_TOKENS)
        assert answered["choices"][0]["token_ids"] == list(reference.output)
        return all_counters(pair)[P]["blocks_sent"] - before

    assert answer() > 0
    for _ in range(CUTS):
        assert cut_data_path(pair) > 0
        answer()  # this request learns of it
        assert answer() > 0, "the pair has not found together again"
