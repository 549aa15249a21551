"""What the transfer thread makes of commands and of a transport's reports."""

from __future__ import annotations

import pytest

from kv_transfer.transfer_loop import (
    NotificationArrived,
    PeerAdded,
    PeerFailed,
    TransferEvent,
    TransferLoop,
    WriteCommand,
    WriteFinished,
)
from kv_transfer.transports.interface import Notification, PeerLost, PeerReady
from tests.unit.kv_transfer.fake_transport import FakeTransport


class Rig:
    """A loop on a fake transport, with a clock that stands still."""

    def __init__(self) -> None:
        self.now, self.wall_us = 0.0, 0
        self.transport = FakeTransport()
        self._events: list[TransferEvent] = []
        self.loop = TransferLoop(
            self.transport,
            self._events.append,
            write_timeout_s=5.0,
            clock=lambda: self.now,
            wall_us=lambda: self.wall_us,
        )

    def write(self, key: str, agent: str = "peer", *, blocks: tuple[int, ...] = (1,)) -> None:
        self.loop.write(WriteCommand(key, agent, blocks, blocks, b"note"))

    def events(self) -> list[tuple[object, ...]]:
        """What happened since the last call, without times."""
        events = [
            (event.key, event.error) if isinstance(event, WriteFinished) else (event,)
            for event in self._events
        ]
        self._events.clear()
        return events


@pytest.fixture
def rig() -> Rig:
    rig = Rig()
    rig.loop.add_peer("peer", b"", 1)
    rig.loop.poll()
    assert rig.events() == [(PeerAdded("peer"),)]
    return rig


def test_a_write_finishes_when_the_transport_says_so(rig: Rig) -> None:
    rig.write("a")
    assert rig.loop.has_writes_under_way
    rig.loop.poll()
    assert rig.events() == []
    rig.transport.finish(1)
    rig.loop.poll()
    assert rig.events() == [("a", None)]
    assert not rig.loop.has_writes_under_way


def test_a_write_has_times_by_the_given_clock(rig: Rig) -> None:
    rig.wall_us = 5
    rig.write("a")
    rig.wall_us = 7
    rig.transport.finish(1)
    rig.loop.poll()
    assert rig._events == [WriteFinished("a", None, posted_us=5, done_us=7)]


def test_a_notification_is_passed_on(rig: Rig) -> None:
    rig.transport.reports.append(Notification("peer", b"hello"))
    rig.loop.poll()
    assert rig.events() == [(NotificationArrived("peer", b"hello"),)]


def test_a_peer_that_cannot_be_added(rig: Rig) -> None:
    rig.loop.add_peer("bad", b"", 1)
    assert rig.events() == [(PeerFailed("bad", "a bad peer"),)]
    rig.write("a", "bad")
    assert rig.events() == [("a", "peer bad is not known")]


def test_writes_to_a_peer_that_connects_wait_and_hold_up_no_other(rig: Rig) -> None:
    rig.loop.add_peer("slow", b"", 1)
    assert not rig.loop.has_writes_under_way
    rig.write("a", "slow")
    rig.write("b")
    rig.loop.poll()
    assert rig.transport.writes == {1: "peer"}
    rig.transport.finish(1)
    rig.loop.poll()
    assert rig.events() == [("b", None)]
    assert rig.loop.has_writes_under_way, "the peer is to be asked soon"
    rig.transport.reports.append(PeerReady("slow"))
    rig.loop.poll()
    assert rig.events() == [(PeerAdded("slow"),)]
    assert rig.transport.writes == {2: "slow"}


def test_a_write_to_a_peer_that_connects_ends_with_its_grant(rig: Rig) -> None:
    rig.loop.add_peer("slow", b"", 1)
    rig.loop.write(WriteCommand("a", "slow", (1,), (1,), b"note", post_before=3.0))
    rig.now = 3.0
    rig.transport.reports.append(PeerReady("slow"))
    rig.loop.poll()
    assert rig.events() == [
        (PeerAdded("slow"),),
        ("a", "our grant ended before it was posted"),
    ]
    assert rig.transport.num_posted == 0


def test_a_peer_that_cannot_connect_costs_its_writes(rig: Rig) -> None:
    rig.loop.add_peer("slow", b"", 1)
    rig.write("a", "slow")
    rig.transport.reports.append(PeerLost("slow", "nobody listens"))
    rig.loop.poll()
    assert rig.events() == [("a", "the peer was removed"), (PeerFailed("slow", "nobody listens"),)]
    assert rig.transport.peers == {"peer"}
    assert not rig.loop.has_writes_under_way
    rig.transport.reports.append(PeerLost("slow", "again"))
    rig.loop.poll()
    assert rig.events() == []


def test_a_failed_write_costs_the_peer_and_its_other_writes(rig: Rig) -> None:
    rig.loop.add_peer("other", b"", 1)
    rig.loop.poll()
    rig.write("a")
    rig.write("b")
    rig.write("c", "other")
    rig.events()
    rig.transport.finish(1, "torn")
    rig.loop.poll()
    assert rig.events() == [("a", "torn"), (PeerFailed("peer", "torn"),)]
    rig.loop.poll()
    assert rig.events() == [("b", "the peer was removed")]
    assert rig.transport.peers == {"other"}
    assert rig.loop.has_writes_under_way


def test_a_mismatch_is_not_the_connection_s_fault(rig: Rig) -> None:
    rig.loop.add_peer("unfit", b"", 1)
    assert rig.events() == [(PeerFailed("unfit", "another pool", is_mismatch=True),)]
    rig.loop.write(WriteCommand("a", "peer", (1, 2), (1,), b"note"))
    assert rig.events() == [("a", "other blocks")]
    assert rig.transport.peers == {"peer"}, "which can be written to"


@pytest.mark.parametrize("ended_by", ["a deadline", "its owner", "another introduction"])
def test_a_late_write_does_not_cost_the_peer_that_was_added_again(rig: Rig, ended_by: str) -> None:
    rig.write("a")
    rig.transport.peers.clear()  # the transport cannot cancel the write
    if ended_by == "a deadline":
        rig.now = 5.0
        rig.loop.poll()
        assert rig.events() == [(PeerFailed("peer", "a write took longer than 5 s"),)]
    elif ended_by == "its owner":
        rig.loop.remove_peer("peer")
    rig.loop.add_peer("peer", b"", 1)
    rig.now = 10.0
    rig.loop.poll()
    assert rig.events() == [(PeerAdded("peer"),)]
    assert not rig.loop.has_writes_under_way
    rig.transport.finish(1, "the peer was removed")
    rig.loop.poll()
    assert rig.events() == [("a", "the peer was removed")]
    assert rig.transport.peers == {"peer"}


def test_a_write_that_cannot_be_posted_costs_the_peer(rig: Rig) -> None:
    rig.write("a", blocks=())
    assert rig.events() == [("a", "no blocks"), (PeerFailed("peer", "no blocks"),)]
    assert rig.transport.peers == set()


def test_a_write_past_its_deadline_costs_the_peer_once(rig: Rig) -> None:
    rig.write("a")
    rig.now = 1.0
    rig.write("b")
    rig.now = 4.9
    rig.loop.poll()
    assert rig.events() == []
    rig.now = 5.0
    rig.loop.poll()
    assert rig.events() == [(PeerFailed("peer", "a write took longer than 5 s"),)]
    rig.loop.poll()
    assert rig.events() == [("a", "the peer was removed"), ("b", "the peer was removed")]


def test_a_write_that_lingers_after_its_peer_is_not_waited_for_eagerly(rig: Rig) -> None:
    rig.write("a")
    del rig.transport.writes[1]  # the transport cannot cancel it yet
    rig.loop.remove_peer("peer")
    rig.loop.poll()
    assert rig.events() == []
    assert not rig.loop.has_writes_under_way
    rig.now = 100.0
    rig.loop.poll()
    assert rig.events() == []


def test_closing_fails_what_is_outstanding(rig: Rig) -> None:
    rig.write("a")
    rig.loop.close()
    assert rig.transport.is_closed
    assert rig.events() == [("a", "the transfer service was closed")]


def test_what_waited_too_long_is_not_posted_and_costs_nothing_else(rig: Rig) -> None:
    rig.now = 3.0
    rig.loop.write(WriteCommand("a", "peer", (1,), (1,), b"note", post_before=3.0))
    assert rig.events() == [("a", "our grant ended before it was posted")]
    rig.loop.write(WriteCommand("b", "peer", (1,), (1,), b"note", post_before=3.1))
    assert rig.loop.has_writes_under_way
    assert rig.events() == []


def test_without_a_lease_that_lives_nothing_is_posted(rig: Rig) -> None:
    lease_end = 2.0
    rig.loop.holds_until = lambda: lease_end
    rig.now = 1.9
    rig.write("a")
    rig.now = 2.0
    rig.write("b")
    assert rig.events() == [("b", "our lease ended before it was posted")]
    lease_end = 4.0
    rig.write("c")
    assert rig.events() == []


class Passing:
    """A fence that a test lets pass."""

    def __init__(self) -> None:
        self.has_passed = False

    def is_done(self) -> bool:
        return self.has_passed


def held(key: str, fence: Passing, agent: str = "peer", post_before: float = 9.0) -> WriteCommand:
    return WriteCommand(key, agent, (1,), (1,), b"note", post_before, fence)


def test_a_write_waits_until_its_blocks_are_computed_and_holds_up_no_other(rig: Rig) -> None:
    fence = Passing()
    rig.loop.write(held("a", fence))
    rig.write("b")
    rig.loop.poll()
    assert rig.transport.num_posted == 1
    assert rig.loop.has_writes_under_way
    rig.transport.finish(1)
    rig.loop.poll()
    assert rig.events() == [("b", None)]
    assert rig.loop.has_writes_under_way, "its fence is to be asked soon"
    fence.has_passed = True
    rig.loop.poll()
    rig.transport.finish(2)
    rig.loop.poll()
    assert rig.events() == [("a", None)]
    assert not rig.loop.has_writes_under_way


def test_a_write_whose_fence_never_passes_ends_with_its_grant(rig: Rig) -> None:
    rig.loop.write(held("a", Passing(), post_before=3.0))
    rig.now = 3.0
    rig.loop.poll()
    assert rig.events() == [("a", "our grant ended before it was posted")]
    assert rig.transport.num_posted == 0


@pytest.mark.parametrize("again", [True, False])
def test_what_was_held_back_for_a_peer_that_went_is_not_for_its_successor(
    rig: Rig, again: bool
) -> None:
    fence = Passing()
    rig.loop.write(held("a", fence))
    if again:
        rig.loop.add_peer("peer", b"", 1)
    else:
        rig.loop.remove_peer("peer")
    fence.has_passed = True
    rig.loop.poll()
    assert ("a", "the peer was removed") in rig.events()
    assert rig.transport.num_posted == 0


def test_a_failed_post_ends_what_was_held_back_beside_it_once(rig: Rig) -> None:
    fence = Passing()
    rig.loop.write(WriteCommand("bad", "peer", (), (), b"", computed=fence))
    rig.loop.write(held("a", fence))
    fence.has_passed = True
    rig.loop.poll()
    events = [event for event in rig.events() if event[0] in ("bad", "a")]
    assert events == [("bad", "no blocks"), ("a", "peer peer is not known")]


def test_closing_fails_what_is_held_back(rig: Rig) -> None:
    rig.loop.write(held("a", Passing()))
    rig.loop.close()
    assert rig.events() == [("a", "the transfer service was closed")]
