"""The transfer thread from outside: nothing waits, nothing is lost, and its death is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from kv_transfer.service import EXPECTING_PERIOD_S, TransferService
from kv_transfer.transfer_loop import (
    NotificationArrived,
    PeerAdded,
    PeerFailed,
    ServiceFailed,
    TransferEvent,
    WriteCommand,
    WriteFinished,
)
from kv_transfer.transports.interface import Notification, PoolMemory, Transport
from process.clock import wall_us
from protocol.errors import ConfigError, TransferError
from tests.unit.kv_transfer.fake_transport import FakeTransport

DEADLINE_S = 60.0


class Rig:
    """A service on a fake transport, and a reader that sleeps until it is woken."""

    def __init__(self) -> None:
        self.transport = FakeTransport()
        self.opened_in: threading.Thread | None = None
        self._woken = threading.Event()
        self.service = TransferService(self._open, self._woken.set)

    def _open(self) -> Transport:
        self.opened_in = threading.current_thread()
        return self.transport

    def wait_for(self, count: int) -> list[TransferEvent]:
        """The next events, at least so many."""
        events: list[TransferEvent] = []
        deadline = time.monotonic() + DEADLINE_S
        while len(events) < count:
            assert self._woken.wait(deadline - time.monotonic()), f"only {events}"
            self._woken.clear()
            events += self.service.drain()
        return events

    def wait_for_polls(self, count: int) -> int:
        """How often the transport was polled, when it was at least so often."""
        pause, deadline = threading.Event(), time.monotonic() + DEADLINE_S
        while (polls := self.transport.num_polls) < count:
            assert time.monotonic() < deadline, f"only {polls}"
            pause.wait(0.005)
        return polls


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    rig.service.start()
    yield rig
    rig.service.close()
    assert rig.transport.is_closed
    assert "kv-transfer" not in {thread.name for thread in threading.enumerate()}


def test_the_thread_opens_the_transport(rig: Rig) -> None:
    assert rig.opened_in is not None
    assert rig.opened_in.name == "kv-transfer"
    assert (rig.service.transport_name, rig.service.agent) == ("fake", "fake-agent")
    assert rig.service.paths == ("by hand",)


def test_start_up_calls_return_results_and_errors(rig: Rig) -> None:
    assert rig.service.allocate(64) is None
    pool = PoolMemory(1, 8, 8, "cpu")
    assert rig.service.register(pool) == b"fake descriptor"
    assert rig.transport.pool == pool
    with pytest.raises(ValueError, match="already"):
        rig.service.register(pool)
    rig.service.add_peer("peer", b"", 1)
    assert rig.wait_for(1) == [PeerAdded("peer")]


def test_events_come_in_order_with_times(rig: Rig) -> None:
    before = wall_us()
    rig.service.add_peer("peer", b"", 1)
    rig.service.write(WriteCommand(5, "peer", [0], [0], b""))
    assert rig.wait_for(1) == [PeerAdded("peer")]
    rig.transport.reports.append(Notification("peer", b"note"))
    assert rig.wait_for(1) == [NotificationArrived("peer", b"note")]
    rig.transport.finish(1)
    (done,) = rig.wait_for(1)
    assert isinstance(done, WriteFinished)
    assert (done.key, done.error) == (5, None)
    assert before <= done.posted_us <= done.done_us <= wall_us()


def test_removing_a_peer_fails_its_writes(rig: Rig) -> None:
    rig.service.add_peer("peer", b"", 1)
    assert rig.wait_for(1) == [PeerAdded("peer")]
    rig.service.write(WriteCommand(5, "peer", [0], [0], b""))
    rig.service.remove_peer("peer")
    (done,) = rig.wait_for(1)
    assert isinstance(done, WriteFinished)
    assert done.error == "the peer was removed"


def test_data_is_taken_in_whether_or_not_it_is_expected(rig: Rig) -> None:
    for expects, payload in ((True, b"one"), (False, b"two")):
        rig.service.expect(expects)
        rig.transport.reports.append(Notification("peer", payload))
        assert rig.wait_for(1) == [NotificationArrived("peer", payload)]


def test_expecting_data_leaves_the_core_to_others(rig: Rig) -> None:
    """It lasts as long as a prompt is computed elsewhere; what decodes here may share the core."""
    begin, polls = time.monotonic(), rig.transport.num_polls
    rig.service.expect(True)
    polls = rig.wait_for_polls(polls + 50) - polls
    assert polls <= (time.monotonic() - begin) / EXPECTING_PERIOD_S + 2


def test_a_dying_thread_is_an_event_and_fails_everything(rig: Rig) -> None:
    rig.service.add_peer("peer", b"", 1)
    rig.service.write(WriteCommand(1, "peer", [0], [0], b""))
    rig.wait_for(1)
    rig.transport.poll_error = TransferError("the fabric is gone")
    events = rig.wait_for(2)
    failed = [event for event in events if isinstance(event, WriteFinished)]
    assert [event.key for event in failed] == [1]
    assert "the fabric is gone" in str(failed[0].error)
    assert isinstance(events[-1], ServiceFailed)
    assert rig.transport.is_closed

    rig.service.write(WriteCommand(2, "peer", [0], [0], b""))
    rig.service.add_peer("other", b"", 1)
    events = rig.wait_for(2)  # in any order: what the thread still held may be refused last
    (later,) = [event for event in events if isinstance(event, WriteFinished)]
    assert (later.key, later.posted_us) == (2, 0)
    assert [event.agent for event in events if isinstance(event, PeerFailed)] == ["other"]
    with pytest.raises(TransferError, match="the fabric is gone"):
        rig.service.allocate(1)


def test_the_command_that_kills_the_thread_is_answered(rig: Rig) -> None:
    rig.service.add_peer("peer", b"", 1)
    rig.service.write(WriteCommand(1, "peer", [0], [0], b"bug"))
    rig.service.write(WriteCommand(2, "peer", [0], [0], b""))
    events = rig.wait_for(4)
    assert {event.key for event in events if isinstance(event, WriteFinished)} == {1, 2}
    assert any(isinstance(event, ServiceFailed) for event in events)


def test_closing_fails_what_is_outstanding_and_what_comes_later() -> None:
    rig = Rig()
    rig.service.start()
    rig.service.add_peer("peer", b"", 1)
    rig.service.write(WriteCommand(1, "peer", [0], [0], b""))
    rig.service.close()
    rig.service.write(WriteCommand(2, "peer", [0], [0], b""))
    rig.service.close()
    finished = [event for event in rig.service.drain() if isinstance(event, WriteFinished)]
    assert [event.key for event in finished] == [1, 2]
    assert {event.error for event in finished} == {"the transfer service was closed"}


def test_a_transport_that_cannot_open_fails_the_start() -> None:
    def refuse() -> Transport:
        raise ConfigError("no such fabric")

    service = TransferService(refuse, lambda: None)
    with pytest.raises(ConfigError, match="no such fabric"):
        service.start()
    service.close()
    with pytest.raises(TransferError, match="no such fabric"):
        service.allocate(1)


def test_a_service_that_was_not_started() -> None:
    service = TransferService(FakeTransport, lambda: None)
    service.write(WriteCommand(1, "peer", [0], [0], b""))
    (event,) = service.drain()
    assert isinstance(event, WriteFinished)
    assert "not started" in str(event.error)
    service.close()
