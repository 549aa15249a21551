"""Transfers that fail, hang or arrive corrupt: the attempt fails, the request goes on."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import cast

import pytest

from kv_transfer.transports.healing import HealingTransport
from kv_transfer.transports.interface import PoolMemory, WriteDone
from protocol.messages import Role
from tests.effort import in_turn, some
from tests.faults.faulty_fleet import FaultyFleet, Stream, faulty_fleet
from tests.faults.faulty_worker import WRITE_TIMEOUT, FaultPoints, spoil_writes
from tests.integration.fleets import assert_idle, counters, trace_of, wait_for
from tests.integration.reference import BLOCK, NUM_TOKENS, Reference
from tests.unit.kv_transfer.fake_transport import FakeTransport

REASONS = {
    "fail": "the write failed",
    "hang": "the sink cannot be reached",
    "corrupt": "the digest of a block differs",
}


@pytest.fixture(scope="module", params=some(["nixl", "shm"], 1))
def fleet(request: pytest.FixtureRequest) -> Iterator[FaultyFleet]:
    settings = {"prefill": 2, "decode": 1, "transport": request.param, "kv_checksum": True}
    with faulty_fleet({WRITE_TIMEOUT: "4"}, **settings) as fleet:
        yield fleet


def test_every_write_that_hangs_ends_once_at_its_own_end() -> None:
    """Whichever end of a healing transport is driven first; else the thread of transfers dies."""

    class Points:
        def strikes(self, kind: str) -> bool:
            return kind == "hang"

    class Spoilt(FakeTransport):
        pass

    spoil_writes(Spoilt, cast(FaultPoints, Points()))
    ends = (Spoilt(f"end-{number}") for number in itertools.count())
    transport = HealingTransport(lambda: next(ends))
    transport.register(PoolMemory(4096, 64, 8, "cpu"))
    posted: list[int] = []
    over: list[int] = []
    for peers in (("a", "a", "b"), ("a", "b")):  # a's writes fail, so its next end is another one
        for peer in dict.fromkeys(peers):
            transport.add_peer(peer, b"where", 8)
        posted += [transport.post_write(peer, [1], [1], b"") for peer in peers]
        for peer in peers:
            transport.remove_peer(peer)
            over += [each.handle for each in transport.poll() if isinstance(each, WriteDone)]
    assert sorted(over) == posted
    transport.close()


@pytest.mark.parametrize(("kind", "write"), in_turn(REASONS, [1, 3]))
def test_the_request_goes_on_with_another_prefill_worker(
    fleet: FaultyFleet, long_prompts: list[Reference], kind: str, write: int
) -> None:
    """With checksums nothing that arrived counts before all of it was compared."""
    reference = long_prompts[2 * list(REASONS).index(kind) + write // 3]
    fleet.spoil(Role.PREFILL, kind, write)
    stream = Stream(fleet.url, list(reference.prompt), NUM_TOKENS)
    spoilt = fleet.spoilt(kind)
    stream.wait()
    assert (stream.error, stream.tokens) == (None, list(reference.output))
    first, retry = trace_of(fleet.fleet, stream.request_id)["attempts"]
    assert REASONS[kind] in first["failed"]
    assert retry["prefill"]["worker_id"] != spoilt
    assert retry["decode"]["granted_blocks"] >= len(reference.prompt) // BLOCK
    assert_idle(fleet.fleet)


def test_a_pair_that_had_a_failed_write_finds_together_again(
    fleet: FaultyFleet, long_prompts: list[Reference]
) -> None:
    before = {
        name: counters(fleet.fleet, name)["blocks_sent"] for name in ("prefill-1", "prefill-2")
    }
    randrange = random.Random(2).randrange

    def have_sent() -> bool:
        """Where a prompt goes is partly chance."""
        streams = [Stream(fleet.url, [randrange(3, 500) for _ in range(90)], 1) for _ in range(2)]
        for stream in streams:
            assert stream.wait().error is None
        return all(counters(fleet.fleet, name)["blocks_sent"] > before[name] for name in before)

    wait_for("both prefill workers to send blocks", have_sent)
    for reference in long_prompts[6:8]:
        stream = Stream(fleet.url, list(reference.prompt), NUM_TOKENS).wait()
        assert (stream.error, stream.tokens) == (None, list(reference.output))
