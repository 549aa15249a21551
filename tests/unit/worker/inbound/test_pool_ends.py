"""The ends that peers write to: another end for a peer that cannot write to one, and no end longer
than a peer knows it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kv_transfer.transfer_loop import TargetRenewed
from protocol.handoff_messages import PeerDescriptor, PoolUnreachable
from tests.unit.fake_peers import FakePeers, FakeTransfers
from worker.inbound.pool_ends import PoolEnds

FIRST = PeerDescriptor(
    agent="first", transport="fake", descriptor=b"there", num_blocks=8, digest=b"d" * 32
)


@pytest.fixture
def peers() -> FakePeers:
    return FakePeers(FIRST)


@pytest.fixture
def transfers() -> FakeTransfers:
    transfers = FakeTransfers("first")
    transfers.spares = ["second", "third"]
    return transfers


@pytest.fixture
def ends(peers: FakePeers, transfers: FakeTransfers) -> PoolEnds:
    host: Any = SimpleNamespace(
        settings=SimpleNamespace(cluster_secret="secret"), transfers=transfers
    )
    links: Any = peers
    return PoolEnds(host, links)


def test_a_former_end_is_retired_with_the_last_peer_that_knows_it(
    ends: PoolEnds, peers: FakePeers, transfers: FakeTransfers
) -> None:
    peers.introduced = {"p": FIRST, "q": FIRST}
    ends.on_unreachable("p", PoolUnreachable(agent="first"))
    ends.on_renewed(TargetRenewed("first", "second", b"there"))
    peers.descriptor = peers.introduced["p"]
    assert peers.agents == {"first", "second"}
    ends.retire_unused()
    assert transfers.retired == [], "q writes to it"
    del peers.introduced["q"]
    ends.retire_unused()
    ends.retire_unused()
    assert transfers.retired == ["first"]


def test_a_late_complaint_about_a_former_end_changes_nothing(
    ends: PoolEnds, peers: FakePeers, transfers: FakeTransfers
) -> None:
    ends.on_unreachable("p", PoolUnreachable(agent="first"))
    ends.on_renewed(TargetRenewed("first", "second", b"there"))
    ends.on_unreachable("p", PoolUnreachable(agent="first"))
    assert transfers.drain() == [TargetRenewed("first", "second", b"there")]
    ends.on_unreachable("p", PoolUnreachable(agent="second"))
    assert transfers.drain() == [TargetRenewed("second", "third", b"there")]
