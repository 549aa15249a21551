"""A write of several ends is over when all its parts are, and then the peer hears of it."""

from __future__ import annotations

import sys

import pytest

from kv_transfer.head_slices import plan_shares
from kv_transfer.transports.end_messages import (
    Write,
    WriteOver,
)
from kv_transfer.transports.interface import (
    PeerReady,
    WriteDone,
)
from kv_transfer.transports.joined import JoinedTransport
from protocol.errors import TransferError
from tests.unit.kv_transfer.transports.joined_ends import (
    NOTE,
    ONE,
    POOL,
    TWO,
    First,
    Worker,
    spread,
)


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
