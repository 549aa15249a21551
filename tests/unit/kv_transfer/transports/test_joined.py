"""Several ends count as one: a write is over when all its parts are, and then the peer hears of it;
what one end loses, all lose."""

from __future__ import annotations

import pytest

from kv_transfer.head_slices import Share, plan_shares
from kv_transfer.transports.distant_end import open_ends
from kv_transfer.transports.end_messages import (
    AddPeer,
    CloseEnd,
    Disconnect,
    Disconnected,
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
)
from kv_transfer.transports.interface import (
    Notification,
    PeerLost,
    PeerReady,
    WriteDone,
)
from kv_transfer.transports.joined import JoinedTransport
from kv_transfer.transports.joined_descriptor import EndOfPool, encode_ends
from protocol.errors import PoolMismatch, TransferError
from protocol.layout import KvLayout
from tests.unit.kv_transfer.transports.joined_ends import (
    NOTE,
    ONE,
    POOL,
    STAGES,
    TWO,
    Far,
    First,
    Worker,
    spread,
)


def test_the_first_end_has_this_hosts_part_of_the_pool(worker: Worker) -> None:
    assert worker.first.pool is POOL


def test_the_owner_hears_what_peers_notify(worker: Worker) -> None:
    worker.first.reports.append(Notification("peer", NOTE))
    assert worker.transport.poll() == [Notification("peer", NOTE)]


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


def test_all_ends_close(worker: Worker) -> None:
    worker.transport.close()
    assert worker.first.is_closed
    assert worker.far.last(CloseEnd) == CloseEnd(0)
    worker.far.says(PeerIsReady(0, "late"))
    assert not worker.transport.renew("first")
