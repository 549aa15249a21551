"""Several ends count as one: a write is over when all its parts are, and then the peer hears of it;
what one end loses, all lose."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import pytest

from kv_transfer.head_slices import Share, plan_shares
from kv_transfer.transports.distant_end import DistantHost, open_ends
from kv_transfer.transports.end_messages import (
    AddPeer,
    CloseEnd,
    Disconnect,
    Disconnected,
    EndOrder,
    EndReport,
    Expect,
    Opened,
    OpenEnd,
    OpenFailed,
    PeerIsLost,
    PeerIsReady,
    RemovePeer,
    Write,
    WriteOver,
    decode_order,
    encode,
)
from kv_transfer.transports.interface import (
    Notification,
    PeerLost,
    PeerReady,
    PoolMemory,
    SharesByGroup,
    WriteDone,
)
from kv_transfer.transports.joined import JoinedTransport
from kv_transfer.transports.joined_descriptor import EndOfPool, encode_ends
from protocol.errors import PoolMismatch, TransferError
from protocol.layout import KvLayout
from tests.unit.kv_transfer.fake_transport import FakeTransport

WHOLE = KvLayout(
    model_fingerprint="m",
    dtype="float32",
    num_layers=2,
    num_kv_heads=4,
    block_size=2,
    head_dim=4,
)
ONE, TWO, STAGES = WHOLE, WHOLE.shard(0, 2), WHOLE.shard(0, 1, 1, 2)
POOL = PoolMemory(4096, 64, 8, "cpu")
NOTE = b"note"


class First(FakeTransport):
    """The end on the head's host."""

    def __init__(self) -> None:
        super().__init__("first")
        self.shares: dict[str, SharesByGroup] = {}
        self.notes: list[tuple[str, bytes]] = []
        self.posted: list[tuple[str, bytes]] = []
        self.post_before: list[object] = []

    def add_peer(
        self, agent: str, descriptor: bytes, num_blocks: int, shares: SharesByGroup = ()
    ) -> None:
        super().add_peer(agent, descriptor, num_blocks, shares)
        self.shares[agent] = shares

    def post_write(self, agent: str, *rest: object) -> int:  # type: ignore[override]
        handle = super().post_write(agent, *rest)  # type: ignore[arg-type]
        self.posted.append((agent, rest[2]))  # type: ignore[arg-type]
        self.post_before += rest[4:]
        return handle

    def notify(self, agent: str, payload: bytes) -> None:
        if agent not in self.peers:
            raise TransferError(f"{agent} is gone")
        self.notes.append((agent, payload))


class Far:
    """Another host, which does what a test says."""

    def __init__(self) -> None:
        self.orders: list[EndOrder] = []
        self.host = DistantHost(self._take)
        self.answers: dict[type, Callable[[int], EndReport]] = {
            OpenEnd: lambda end: Opened(end, "far", b"of far", 1),
        }

    def _take(self, data: bytes) -> None:
        order = decode_order(data)
        self.orders.append(order)
        answer = self.answers.get(type(order))
        if answer is not None:
            self.host.take(encode(answer(order.end)))

    def says(self, report: EndReport) -> None:
        self.host.take(encode(report))

    def last(self, kind: type) -> EndOrder:
        return [each for each in self.orders if isinstance(each, kind)][-1]


class Worker:
    """A worker of two ranks, one of them on another host."""

    def __init__(self) -> None:
        self.first, self.far = First(), Far()
        self.transport = JoinedTransport(self.first, lambda: open_ends([self.far.host]))
        self.transport.register(POOL)

    def add(self, theirs: KvLayout, descriptor: bytes = b"where", ours: KvLayout = TWO) -> None:
        self.transport.add_peer("peer", descriptor, 8, plan_shares(ours, theirs))

    def ready(self, theirs: KvLayout = ONE, descriptor: bytes = b"where") -> None:
        self.add(theirs, descriptor)
        for each in self.far.orders:
            if isinstance(each, AddPeer):
                self.far.says(PeerIsReady(each.end, each.agent))
        assert self.transport.poll() == [PeerReady("peer")]

    def post(self, post_before: float = math.inf) -> int:
        return self.transport.post_write("peer", [1], [2], NOTE, 0, post_before)


@pytest.fixture
def worker() -> Worker:
    return Worker()


def spread(*names: str) -> bytes:
    return encode_ends([EndOfPool(name, 1, f"of {name}".encode()) for name in names])


def test_the_first_end_has_this_hosts_part_of_the_pool(worker: Worker) -> None:
    assert worker.first.pool is POOL


def test_the_owner_hears_what_peers_notify(worker: Worker) -> None:
    worker.first.reports.append(Notification("peer", NOTE))
    assert worker.transport.poll() == [Notification("peer", NOTE)]


def test_a_write_that_is_over_is_forgotten(worker: Worker) -> None:
    worker.ready()
    note = bytes(bytearray(NOTE))
    unused = sys.getrefcount(note)
    worker.transport.post_write("peer", [1], [2], note)
    order = worker.far.last(Write)
    assert isinstance(order, Write)
    worker.far.says(WriteOver(0, order.handle, None))
    worker.first.finish(1)
    assert len(worker.transport.poll()) == 1
    assert worker.first.notes.pop() == ("peer", NOTE)
    assert sys.getrefcount(note) == unused


def test_the_descriptor_lists_all_ends(worker: Worker) -> None:
    expected = [EndOfPool("first", 1, b"fake descriptor"), EndOfPool("far", 1, b"of far")]
    assert worker.transport.descriptor() == encode_ends(expected)
    alone = JoinedTransport(First())
    alone.register(POOL)
    assert alone.descriptor() == b"fake descriptor"


def test_a_peer_is_ready_when_all_ends_reach_it(worker: Worker) -> None:
    worker.add(ONE)
    assert worker.transport.poll() == []
    order = worker.far.last(AddPeer)
    assert isinstance(order, AddPeer)
    assert (order.agent, order.descriptor, order.num_blocks) == ("peer", b"where", 8)
    ((share,),) = order.shares
    ((of_first,),) = worker.first.shares["peer"]
    assert (share.source, share.target, of_first.source, of_first.target) == (0, 0, 0, 0)
    assert [share.slices, of_first.slices] == [s.slices for s in plan_shares(TWO, ONE)[0]][::-1]
    worker.far.says(PeerIsReady(0, "peer"))
    assert worker.transport.poll() == [PeerReady("peer")]


@pytest.mark.parametrize("last", ["first", "far"])
def test_the_peer_is_notified_of_a_write_when_all_parts_are_over(worker: Worker, last: str) -> None:
    worker.ready()
    handle = worker.post()
    assert worker.first.posted == [("peer", b"")], "no part notifies the peer"
    order = worker.far.last(Write)
    assert isinstance(order, Write)
    blocks = (order.source_blocks, order.target_blocks, order.group)
    assert (order.agent, *blocks) == ("peer", [1], [2], 0)
    ends = [
        lambda: worker.first.finish(1),
        lambda: worker.far.says(WriteOver(0, order.handle, None)),
    ]
    first, second = ends if last == "far" else ends[::-1]
    first()
    assert worker.transport.poll() == []
    assert worker.first.notes == []
    second()
    assert worker.transport.poll() == [WriteDone(handle, None)]
    assert worker.first.notes == [("peer", NOTE)]


@pytest.mark.parametrize("failing", ["first", "far", "peer gone"])
def test_a_part_that_fails_fails_the_write_once_all_are_over(worker: Worker, failing: str) -> None:
    worker.ready()
    handle, order = worker.post(), worker.far.last(Write)
    assert isinstance(order, Write)
    worker.first.finish(1, "broken" if failing == "first" else None)
    assert worker.transport.poll() == [], "the other end may still write"
    if failing == "peer gone":
        worker.transport.remove_peer("peer")
    worker.far.says(WriteOver(0, order.handle, "broken" if failing == "far" else None))
    expected = "the peer was removed" if failing == "peer gone" else "broken"
    assert worker.transport.poll() == [WriteDone(handle, expected)]
    assert worker.first.notes == []


def test_writes_beside_each_other_do_not_mix(worker: Worker) -> None:
    worker.ready()
    one, other = worker.post(), worker.post()
    handles = [each.handle for each in worker.far.orders if isinstance(each, Write)]
    worker.first.finish(1)
    worker.far.says(WriteOver(0, handles[1], None))
    assert worker.transport.poll() == []
    worker.far.says(WriteOver(0, handles[0], None))
    assert worker.transport.poll() == [WriteDone(one, None)]
    worker.first.finish(2)
    assert worker.transport.poll() == [WriteDone(other, None)]


def test_a_peer_that_one_end_loses_is_lost_at_all(worker: Worker) -> None:
    worker.ready()
    worker.post()
    worker.far.says(PeerIsLost(0, "peer", "no way"))
    worker.far.says(PeerIsLost(0, "peer", "no way"))
    assert worker.transport.poll() == [PeerLost("peer", "no way")]
    assert worker.first.peers == set()
    assert worker.far.last(RemovePeer) == RemovePeer(0, "peer")
    with pytest.raises(TransferError, match="peer peer is not known"):
        worker.post()


def test_each_end_reaches_the_ends_with_which_it_shares(worker: Worker) -> None:
    """Two ranks to two of the same: rank by rank, and the notification goes to the first."""
    worker.ready(TWO, spread("peer", "peer's"))
    assert worker.first.peers == {"peer"}
    added = worker.far.last(AddPeer)
    assert isinstance(added, AddPeer)
    assert (added.agent, added.descriptor) == ("peer's", b"of peer's")
    assert sum(isinstance(each, AddPeer) for each in worker.far.orders) == 1, "nothing to share"
    ((share,),) = added.shares
    assert (share.source, share.target) == (0, 0), "ranks count from the end's first"
    worker.post()
    order = worker.far.last(Write)
    assert isinstance(order, Write)
    assert order.agent == "peer's"


def test_a_first_end_without_a_share_still_notifies() -> None:
    """Two stages to two: our first end and theirs hold other layers if theirs are turned."""
    worker = Worker()
    turned = [tuple(swapped(each) for each in group) for group in plan_shares(STAGES, STAGES)]
    worker.transport.add_peer("peer", spread("peer", "peer's"), 8, turned)
    assert worker.first.peers == {"peer", "peer's"}
    assert worker.first.shares["peer"] == [()]
    worker.far.says(PeerIsReady(0, "peer"))
    assert worker.transport.poll() == [PeerReady("peer")]
    handle, order = worker.post(), worker.far.last(Write)
    assert isinstance(order, Write)
    assert worker.first.posted == [("peer's", b"")]
    worker.first.finish(1)
    worker.far.says(WriteOver(0, order.handle, None))
    assert worker.transport.poll() == [WriteDone(handle, None)]
    assert worker.first.notes == [("peer", NOTE)]


def swapped(share: Share) -> Share:
    return Share(share.source, 1 - share.target, share.slices)


def test_workers_of_one_end_each_meet_directly() -> None:
    first = First()
    transport = JoinedTransport(first)
    transport.register(POOL)
    transport.add_peer("peer", b"where", 8)
    assert transport.poll() == [PeerReady("peer")]
    handle = transport.post_write("peer", [1], [2], NOTE)
    assert first.posted == [("peer", NOTE)]
    first.finish(1)
    assert transport.poll() == [WriteDone(handle, None)]
    assert first.notes == []


@pytest.mark.parametrize(
    ("theirs", "descriptor", "said"),
    [
        (ONE, spread("other", "peer"), "names other ends"),
        (TWO, spread("peer"), "names other ends"),
        (TWO, spread("peer", "peer"), "names other ends"),
        (TWO, b"joined?", "cannot be used"),
        (ONE, spread("peer", "peer's"), "do not fit shares of 2 and 1 ranks"),
        (TWO, encode_ends([EndOfPool("peer", 0, b""), EndOfPool("b", 2, b"")]), "other ends"),
    ],
)
def test_a_peer_that_does_not_fit_leaves_nothing(
    worker: Worker, theirs: KvLayout, descriptor: bytes, said: str
) -> None:
    with pytest.raises(PoolMismatch, match=said):
        worker.add(theirs, descriptor)
    with pytest.raises(TransferError, match="is not known"):
        worker.post()
    with pytest.raises(PoolMismatch, match="do not fit shares of 1 and 1 ranks"):
        worker.add(ONE, ours=ONE)


def test_a_peer_that_the_second_end_of_it_refuses_leaves_nothing() -> None:
    first = First()
    transport = JoinedTransport(first)
    transport.register(POOL)
    with pytest.raises(TransferError, match="a bad peer"):
        transport.add_peer("peer", spread("peer", "bad"), 8, plan_shares(ONE, TWO))
    assert first.peers == set()


def test_a_write_that_cannot_be_posted_was_told_to_nobody(worker: Worker) -> None:
    worker.ready()
    with pytest.raises(TransferError, match="no blocks"):
        worker.transport.post_write("peer", [], [], NOTE)
    assert not [each for each in worker.far.orders if isinstance(each, Write)]


def test_an_order_says_how_long_after_a_beat_it_holds(worker: Worker) -> None:
    worker.ready()
    worker.far.host.beat = 7, 100.0
    worker.post(104.5)
    order = worker.far.last(Write)
    assert isinstance(order, Write)
    assert (order.nonce, order.within_s) == (7, 4.5)
    assert worker.first.post_before == [104.5]


def test_connections_break_at_every_end_and_none_is_waited_for(worker: Worker) -> None:
    assert not worker.transport.is_disconnecting
    for kept in ("10.0.0.1", "10.0.0.2"):
        assert worker.transport.disconnect({kept}) == 1, "the first end's"
        assert worker.far.last(Disconnect) == Disconnect(0, [kept])
    assert worker.first.disconnected == [{"10.0.0.1"}, {"10.0.0.2"}]
    worker.far.says(Disconnected(0))
    assert worker.transport.is_disconnecting, "the second order is not carried out"
    worker.far.says(Disconnected(0))
    assert not worker.transport.is_disconnecting


def test_an_end_that_is_closed_has_no_connections(worker: Worker) -> None:
    worker.transport.disconnect(())
    worker.transport.close()
    assert not worker.transport.is_disconnecting


def test_an_end_that_cannot_open_fails_the_pool() -> None:
    far = Far()
    far.answers[OpenEnd] = lambda end: OpenFailed(end, "no UCX")
    with pytest.raises(TransferError, match="this worker cannot open an end: no UCX"):
        JoinedTransport(First(), lambda: open_ends([far.host])).register(POOL)
    del far.answers[OpenEnd]
    with pytest.raises(TransferError, match="has not opened an end in time"):
        open_ends([far.host], 0.0)
    assert far.orders[-1] == CloseEnd(1)
    far.says(Opened(1, "late", b"", 1))


def test_hosts_open_their_ends_at_the_same_time_and_all_or_none_stay_open() -> None:
    one, other = Far(), Far()
    open_it = one.answers.pop(OpenEnd)

    def open_both(end: int) -> EndReport:
        one.says(open_it(end))  # one host answers only when the other one is told
        return Opened(end, "other", b"of other", 1)

    other.answers[OpenEnd] = open_both
    assert [end.agent for end in open_ends([one.host, other.host])] == ["far", "other"]
    one.answers[OpenEnd] = open_it
    other.answers[OpenEnd] = lambda end: OpenFailed(end, "no UCX")
    with pytest.raises(TransferError, match="no UCX"):
        open_ends([one.host, other.host])
    assert (one.orders[-1], other.orders[-1]) == (CloseEnd(1), CloseEnd(1))


def test_every_end_learns_when_data_is_expected(worker: Worker) -> None:
    worker.transport.expect(True)
    assert worker.far.last(Expect) == Expect(0, True)
    assert worker.first.expected == [True]


def test_a_second_way_of_our_end_that_fails_fails_the_write_that_has_begun() -> None:
    first = First()
    transport = JoinedTransport(first)
    transport.register(POOL)
    transport.add_peer("peer", spread("peer", "peer's"), 8, plan_shares(ONE, TWO))
    assert transport.poll() == [PeerReady("peer")]
    first.peers.remove("peer's")
    handle = transport.post_write("peer", [1], [2], NOTE)
    assert transport.poll() == [], "the first part may still be written"
    first.finish(1)
    assert transport.poll() == [WriteDone(handle, "peer peer's is not known")]
    assert first.notes == []


def test_all_ends_close(worker: Worker) -> None:
    worker.transport.close()
    assert worker.first.is_closed
    assert worker.far.last(CloseEnd) == CloseEnd(0)
    worker.far.says(PeerIsReady(0, "late"))
    assert not worker.transport.renew("first")
