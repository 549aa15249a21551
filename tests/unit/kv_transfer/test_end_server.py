"""Ends that serve another host's head: they do what they are told and report what comes of it, and
an end that can do nothing any more ends its worker."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import pytest

from kv_transfer import service
from kv_transfer.end_server import EndFailed, EndServer
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
    decode_report,
    encode,
)
from kv_transfer.transports.interface import PoolMemory, PoolPart, Transport
from protocol.errors import ConfigError, ProtocolError, TransferError
from tests.unit.kv_transfer.fake_transport import FakeTransport

DEADLINE_S = 20.0
POOL = PoolMemory(4096, 64, 8, "cpu", (PoolPart(9999, 64, "cpu"),))


class Passing:
    """A fence that a test passes."""

    has_passed = False

    def is_done(self) -> bool:
        return self.has_passed


class End(FakeTransport):
    """Says when it is closed."""

    def __init__(self, agent: str) -> None:
        super().__init__(agent)
        self.may_close = threading.Event()
        self.may_close.set()
        self.closed = threading.Event()
        self.posted: SimpleQueue[object] = SimpleQueue()  # the groups of writes

    def post_write(self, *arguments: Any) -> int:
        self.posted.put(arguments[4])
        return super().post_write(*arguments)

    def close(self) -> None:
        assert self.may_close.wait(DEADLINE_S)
        super().close()
        self.closed.set()


class Rig:
    """A server whose ends are fakes, and what it has reported."""

    def __init__(self) -> None:
        self.opened: list[End] = []
        self.open_error: Exception | None = None
        self.opens_now = threading.Event()
        self.opens_now.set()
        self.woken = threading.Event()
        self.fence: Passing | None = None
        self.server = EndServer(
            self._open, POOL, {1: 0.0, 2: 1e12}.get, self.woken.set, self._behind
        )

    def _open(self) -> Transport:
        assert self.opens_now.wait(DEADLINE_S)
        if self.open_error is not None:
            raise self.open_error
        self.opened.append(End(f"end-{len(self.opened)}"))
        return self.opened[-1]

    def _behind(self, group: int, blocks: Sequence[int]) -> Passing | None:
        return self.fence if (group, blocks) == (1, [1]) else None

    def tell(self, order: EndOrder) -> None:
        self.server.take(encode(order))

    def next(self) -> list[EndReport]:
        """The next reports; waits for them."""
        while not (reports := self.server.drain()):
            assert self.woken.wait(DEADLINE_S)
            self.woken.clear()
        return [decode_report(each) for each in reports]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.server.close()


@pytest.fixture
def end(rig: Rig) -> End:
    """The rig's end 3, which is open."""
    rig.tell(OpenEnd(3))
    assert rig.next() == [Opened(3, "end-0", b"fake descriptor", 2)]
    return rig.opened[0]


def write(end: int, handle: int, nonce: int, group: int = 0) -> Write:
    return Write(end, handle, "peer", [1], [2], group, nonce, 5.0)


def test_an_end_does_what_it_is_told(rig: Rig, end: End) -> None:
    assert end.pool == POOL
    rig.tell(AddPeer(3, "peer", b"where", 8, ()))
    assert rig.next() == [PeerIsReady(3, "peer")]
    rig.tell(write(3, 7, 2, group=1))
    rig.tell(RemovePeer(3, "peer"))
    assert rig.next() == [WriteOver(3, 7, "the peer was removed")]
    assert end.posted.get_nowait() == 1
    rig.tell(AddPeer(3, "bad one", b"where", 8, ()))
    assert rig.next() == [PeerIsLost(3, "bad one", "a bad peer")]
    rig.tell(Disconnect(3, ["10.0.0.1"]))
    assert rig.next() == [Disconnected(3)]
    assert end.disconnected == [{"10.0.0.1"}]


def test_a_write_waits_until_its_blocks_are_computed_here(rig: Rig, end: End) -> None:
    fence = rig.fence = Passing()
    rig.tell(AddPeer(3, "peer", b"where", 8, ()))
    assert rig.next() == [PeerIsReady(3, "peer")]
    rig.tell(write(3, 7, 2, group=1))
    rig.tell(write(3, 8, 2))
    assert end.posted.get(timeout=DEADLINE_S) == 0
    fence.has_passed = True
    assert end.posted.get(timeout=DEADLINE_S) == 1


def test_a_write_is_posted_in_time_or_not_at_all(rig: Rig, end: End) -> None:
    rig.tell(AddPeer(3, "peer", b"where", 8, ()))
    assert rig.next() == [PeerIsReady(3, "peer")]
    rig.tell(write(3, 7, 1))
    assert rig.next() == [WriteOver(3, 7, "our grant ended before it was posted")]
    rig.tell(write(3, 8, 9))
    assert rig.next() == [WriteOver(3, 8, "the order came too late")]
    assert end.num_posted == 0


def test_the_time_for_a_write_counts_from_the_beat_that_its_order_names(rig: Rig, end: End) -> None:
    rig.tell(AddPeer(3, "peer", b"where", 8, ()))
    assert rig.next() == [PeerIsReady(3, "peer")]
    rig.tell(Write(3, 7, "peer", [1], [2], 0, 1, within_s=1e12))
    assert end.posted.get(timeout=DEADLINE_S) == 0


def test_ends_come_and_go_alone(rig: Rig, end: End) -> None:
    rig.tell(OpenEnd(4))
    assert rig.next() == [Opened(4, "end-1", b"fake descriptor", 2)]
    rig.tell(CloseEnd(3))
    assert end.closed.wait(DEADLINE_S)
    assert not rig.opened[1].is_closed
    rig.tell(AddPeer(3, "peer", b"where", 8, ()))
    rig.tell(AddPeer(4, "peer", b"where", 8, ()))
    assert rig.next() == [PeerIsReady(4, "peer")]
    rig.server.close()
    assert rig.opened[1].is_closed


def test_closing_an_end_that_still_opens_holds_up_nobody(rig: Rig) -> None:
    rig.opens_now.clear()
    rig.tell(OpenEnd(3))
    rig.tell(CloseEnd(3))
    assert rig.opened == []
    rig.opens_now.set()
    rig.server.close()
    assert [each.is_closed for each in rig.opened] == [True]


def test_an_end_that_does_not_close_is_logged(
    rig: Rig, end: End, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "CLOSE_TIMEOUT_S", 0.01)
    end.may_close.clear()
    rig.server.close()
    assert "was not closed cleanly: the transfer thread did not end" in caplog.text
    end.may_close.set()
    assert end.closed.wait(DEADLINE_S)


def test_an_end_polls_more_often_only_while_it_is_told_to_expect_data(rig: Rig, end: End) -> None:
    assert end.expected == []
    rig.tell(Expect(3, True))
    rig.tell(Expect(3, False))
    rig.server.close()
    assert end.expected == [True, False]


@pytest.mark.parametrize("error", [ConfigError("no more"), TransferError("no more")])
def test_an_end_that_does_not_open_says_why(rig: Rig, error: Exception) -> None:
    rig.open_error = error
    rig.tell(OpenEnd(3))
    assert rig.next() == [OpenFailed(3, "no more")]


def test_an_end_whose_thread_has_died_is_an_error(rig: Rig, end: End) -> None:
    end.poll_error = ZeroDivisionError("a bug")
    with pytest.raises(EndFailed, match="a bug"):
        rig.next()


def test_what_is_no_order_is_refused(rig: Rig) -> None:
    with pytest.raises(ProtocolError, match="a message about an end"):
        rig.server.take(b"\xc1")
