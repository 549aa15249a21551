"""The pools that a worker may write to: of any ranks, but authentic and of the same cache."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import msgspec
import pytest

from engine.kv_pool import KvPool
from kv_transfer.authentication import authenticate_descriptor
from kv_transfer.head_slices import plan_shares
from protocol.errors import ConfigError, ProtocolError
from protocol.handoff_messages import PeerDescriptor
from protocol.layout import KvGroup, KvLayout
from tests.layouts import divisible_layout
from worker.counters import Count, Counters
from worker.transfer_peers import TransferPeers

SECRET = b"of the fleet"
WHOLE = divisible_layout()


class Transfers:
    """A transfer service that records what it was told to add."""

    transport_name = "nixl"

    def __init__(self) -> None:
        self.added: list[Any] = []

    def add_peer(self, *arguments: Any) -> None:
        self.added.append(arguments)


def layout_for(peer_stages: int, num_ranks: int, num_stages: int = 1) -> KvLayout:
    """Of rank 0 of a worker with peers of so many stages."""
    layout = msgspec.structs.replace(WHOLE, peer_stages=peer_stages)
    return layout.shard(0, num_ranks, 0, num_stages)


class Own:
    """A worker of two ranks."""

    def __init__(self, peer_stages: int = 0) -> None:
        self.transfers, self.counters = Transfers(), Counters()
        self.pool = KvPool(layout_for(peer_stages, 2), 3)
        self.peers = TransferPeers(self.transfers, self.pool, SECRET, self.counters)  # type: ignore[arg-type]


def descriptor(of: KvLayout | None, secret: bytes = SECRET, **changed: Any) -> PeerDescriptor:
    digest = authenticate_descriptor(secret, "agent", b"where", 12, of)
    made = PeerDescriptor(
        transport="nixl",
        agent="agent",
        descriptor=b"where",
        digest=digest,
        num_blocks=12,
        layout=of,
    )
    return msgspec.structs.replace(made, **changed)


@pytest.mark.parametrize(("num_ranks", "num_stages"), [(1, 1), (2, 1), (4, 1), (1, 2)])
def test_the_heads_of_each_rank_go_to_their_places(num_ranks: int, num_stages: int) -> None:
    own = Own()
    theirs = WHOLE.shard(0, num_ranks, 0, num_stages)
    own.peers.add(descriptor(None if theirs == WHOLE else theirs))
    shares = plan_shares(WHOLE.shard(0, 2), theirs)
    assert own.transfers.added == [("agent", b"where", 12, shares)]


OURS = "this worker with peer_tensor_parallel {} and peer_pipeline_parallel {}"
THEIRS = "agent agent with peer_tensor_parallel 2 and peer_pipeline_parallel 1"


@pytest.mark.parametrize(
    ("own_peer_stages", "theirs", "pieces", "advice"),
    [
        (1, layout_for(1, 1), None, None),
        (1, layout_for(1, 4), None, None),
        (0, layout_for(0, 2), None, None),
        (0, layout_for(0, 1), 4, f"{OURS.format(1, 1)}, and {THEIRS}"),
        (1, layout_for(0, 1), 8, THEIRS),
        (0, layout_for(1, 4), 4, OURS.format(4, 1)),
        (1, layout_for(0, 2), 8, OURS.format(2, 1)),
        (0, layout_for(1, 2), 8, THEIRS),
        (1, layout_for(1, 1, 2), 2, OURS.format(1, 2)),
    ],
)
def test_one_line_says_which_side_was_told_of_other_ranks(
    own_peer_stages: int,
    theirs: KvLayout,
    pieces: int | None,
    advice: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    own = Own(own_peer_stages)
    own.peers.add(descriptor(theirs))
    assert caplog.messages == [
        f"each KV block goes to agent agent in {pieces} pieces for each pair of ranks, which is "
        f"slow: start {advice}"
    ] * (advice is not None)


def test_the_group_with_the_most_pieces_counts(caplog: pytest.LogCaptureFixture) -> None:
    own, groups = Own(), (KvGroup((0,)), KvGroup((1, 2), 4))
    whole = msgspec.structs.replace(WHOLE, num_layers=3, grouping=groups)
    own.pool.layout = whole.shard(0, 2)
    own.peers.add(descriptor(whole.shard(0, 4)))
    assert "in 4 pieces" in caplog.text


def test_shared_memory_is_copied_as_fast_in_small_pieces(caplog: pytest.LogCaptureFixture) -> None:
    own = Own()
    own.transfers.transport_name = "shm"
    own.peers.add(descriptor(layout_for(0, 1), transport="shm"))
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (descriptor(WHOLE.shard(0, 2), b"other"), "not authentic"),
        (descriptor(WHOLE.shard(0, 2), layout=WHOLE.shard(0, 4)), "not authentic"),
        (descriptor(WHOLE.shard(0, 2), layout=None), "not authentic"),
        (descriptor(WHOLE.shard(0, 2), transport="shm"), "transport differs"),
        (descriptor(msgspec.structs.replace(WHOLE, block_size=4)), "differ in more"),
        (descriptor(msgspec.structs.replace(WHOLE.shard(0, 2), tp_size=3)), "no rank 0 of 3"),
        (descriptor(msgspec.structs.replace(WHOLE, peer_stages=99)), "no worker has 99 stages"),
        (
            descriptor(msgspec.structs.replace(WHOLE.shard(0, 1, 1, 2), stage_ends=(1,))),
            "stages end",
        ),
        (descriptor(msgspec.structs.replace(WHOLE, stage_ends=(9,))), "stages end"),
        (descriptor(msgspec.structs.replace(layout_for(1, 1), peer_ends=(9,))), "stages end"),
    ],
)
def test_others_are_refused_counted_and_named(
    message: PeerDescriptor, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    own = Own()
    with pytest.raises((ConfigError, ProtocolError), match=reason):
        own.peers.add(message)
    assert own.transfers.added == []
    assert own.counters[Count.DESCRIPTORS_REFUSED] == 1
    assert reason in caplog.text


@pytest.mark.parametrize(
    ("num_ranks", "num_stages", "peer_stages"), [(2, 1, 0), (1, 2, 0), (8, 2, 0), (2, 2, 1)]
)
def test_a_digest_covers_the_heads_of_all_ranks(
    num_ranks: int, num_stages: int, peer_stages: int
) -> None:
    whole = KvPool(WHOLE, 2)
    whole.tensor.copy_(whole.tensor.new_tensor(range(whole.tensor.numel())).view_as(whole.tensor))
    layout = msgspec.structs.replace(WHOLE, peer_stages=peer_stages)
    parts = [KvPool(each, 2) for each in layout.shard(0, num_ranks, 0, num_stages).ranks]
    for part in parts:
        heads = part.layout.heads
        for number, layer in enumerate(part.layout.layers):
            part.layer(number).copy_(whole.layer(layer)[:, :, heads.start : heads.stop])
    shared = KvPool(parts[0].layout, 2, others=parts[1:])
    shared.tensor.copy_(parts[0].tensor)
    assert [shared.digest(block) for block in (0, 1)] == [whole.digest(0), whole.digest(1)]
    parts[-1].layer(0)[1, 0, 0, 0, 0] += 1
    assert shared.digest(1) != whole.digest(1)


@pytest.mark.parametrize("num_others", [0, 1])
def test_digests_of_whole_blocks_need_all_ranks_here(
    num_others: int, caplog: pytest.LogCaptureFixture
) -> None:
    own = Own()
    own.pool.others = [KvPool(WHOLE.shard(1, 2), 3)][:num_others]
    own.peers.add(descriptor(None))  # wants none
    with nullcontext() if num_others else pytest.raises(ProtocolError, match="no process of this"):
        own.peers.add(descriptor(None, wants_digests=True))
    assert ("no process of this worker has whole blocks" in caplog.text) is not bool(num_others)
    assert own.counters[Count.DESCRIPTORS_REFUSED] == 1 - num_others
