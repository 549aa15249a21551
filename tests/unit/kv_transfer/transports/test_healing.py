"""A peer whose way has failed is added again by another end; ends that are of no more use go."""

from __future__ import annotations

import pytest

from kv_transfer.transports.healing import MAX_ENDS, HealingTransport
from kv_transfer.transports.interface import Notification, PeerLost, PoolMemory, WriteDone
from protocol.errors import ConfigError, PoolMismatch, TransferError
from tests.unit.kv_transfer.fake_transport import FakeTransport

POOL = PoolMemory(4096, 64, 8, "cpu")
NOTE = b"note"


class Rig:
    """A healing transport, and the ends that it has opened."""

    def __init__(self) -> None:
        self.ends: list[FakeTransport] = []
        self.may_open = True
        self.transport = HealingTransport(self._open)
        self.transport.register(POOL)

    def _open(self) -> FakeTransport:
        if not self.may_open:
            raise ConfigError("no more")
        self.ends.append(FakeTransport(f"end-{len(self.ends)}"))
        return self.ends[-1]

    @property
    def open_ends(self) -> list[str]:
        return [each.agent for each in self.ends if not each.is_closed]

    def add(self, peer: str) -> str:
        """The name of the end to which the peer was added."""
        self.transport.add_peer(peer, b"where", 8)
        (end,) = [each.agent for each in self.ends if peer in each.peers]
        return end

    def fail_write(self, peer: str) -> None:
        """A write to the peer fails, and the peer is removed, as the loop of transfers does."""
        handle = self.transport.post_write(peer, [1], [1], NOTE)
        (end,) = [each for each in self.ends if peer in each.peers]
        end.finish(next(reversed(end.writes)), "the connection broke")
        assert WriteDone(handle, "the connection broke") in self.transport.poll()
        self.transport.remove_peer(peer)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_peers_share_an_end_until_the_way_to_one_fails(rig: Rig) -> None:
    assert [rig.add(peer) for peer in ("a", "b")] == ["end-0", "end-0"]
    rig.fail_write("a")
    assert rig.add("a") == "end-1"
    assert rig.ends[1].pool == POOL
    assert rig.ends[0].peers == {"b"}, "which goes on as before"
    rig.fail_write("b")
    assert rig.add("b") == "end-1", "which is newer than the one that failed"
    assert rig.add("c") == "end-1"


def test_a_peer_that_was_removed_without_a_failure_comes_back_where_it_was(rig: Rig) -> None:
    rig.add("a")
    rig.transport.remove_peer("a")
    assert rig.add("a") == "end-0"


@pytest.mark.parametrize("how", ["overrun", "refused", "lost", "unposted"])
def test_every_way_to_fail_counts(rig: Rig, how: str) -> None:
    peer = "bad" if how == "refused" else "a"
    if how == "refused":
        with pytest.raises(TransferError):
            rig.add(peer)
    else:
        rig.add(peer)
    if how == "overrun":  # a write hangs when the peer is removed
        rig.transport.post_write(peer, [1], [1], NOTE)
    elif how == "lost":
        rig.ends[0].peers.remove(peer)
        rig.ends[0].reports.append(PeerLost(peer, "it cannot be reached"))
        assert PeerLost(peer, "it cannot be reached") in rig.transport.poll()
    elif how == "unposted":
        with pytest.raises(TransferError):
            rig.transport.post_write(peer, [], [], NOTE)
    rig.transport.remove_peer(peer)
    if how == "refused":
        with pytest.raises(TransferError):
            rig.add(peer)
        assert len(rig.ends) == 2
    else:
        assert rig.add(peer) == "end-1"


def test_a_mismatch_is_no_failure_of_the_way(rig: Rig) -> None:
    for _ in range(2):
        with pytest.raises(PoolMismatch):
            rig.add("unfit")
    rig.add("a")
    with pytest.raises(PoolMismatch):
        rig.transport.post_write("a", [1, 2], [1], NOTE)
    assert rig.add("a") == "end-0"
    assert rig.open_ends == ["end-0"]


def test_a_write_that_hangs_in_a_former_end_is_over_when_that_end_says_so(rig: Rig) -> None:
    rig.add("a")
    handle = rig.transport.post_write("a", [1], [1], NOTE)
    late = rig.ends[0].writes
    rig.ends[0].peers.clear()  # it cannot cancel the write
    rig.transport.remove_peer("a")
    assert rig.add("a") == "end-1"
    again = rig.transport.post_write("a", [2], [2], NOTE)
    assert again != handle
    assert not [event for event in rig.transport.poll() if isinstance(event, WriteDone)]
    rig.ends[0].finish(next(iter(late)), "the peer was removed")
    rig.ends[1].finish(next(iter(rig.ends[1].writes)))
    done = [event for event in rig.transport.poll() if isinstance(event, WriteDone)]
    assert done == [WriteDone(handle, "the peer was removed"), WriteDone(again, None)]


def test_a_late_write_of_a_former_end_hides_no_later_failure(rig: Rig) -> None:
    rig.add("a")
    rig.transport.post_write("a", [1], [1], NOTE)
    late = next(iter(rig.ends[0].writes))
    rig.ends[0].peers.clear()  # it cannot cancel the write
    rig.transport.remove_peer("a")
    assert rig.add("a") == "end-1"
    rig.fail_write("a")
    rig.ends[0].finish(late, "the peer was removed")
    rig.transport.poll()
    assert rig.add("a") == "end-2"


def test_an_end_without_peers_and_writes_is_closed_once_there_is_a_newer_one(rig: Rig) -> None:
    rig.add("a")
    for _ in range(3):
        rig.fail_write("a")
        rig.add("a")
    rig.transport.poll()
    assert rig.open_ends == ["end-0", "end-3"], "peers write to the first one"


def test_peers_that_cannot_write_to_an_end_get_another_one(rig: Rig) -> None:
    assert rig.transport.agent == "end-0"
    assert rig.transport.renew("end-0")
    assert rig.transport.agent == "end-1"
    assert rig.transport.renew("end-0"), "for a second peer"
    assert len(rig.ends) == 2
    rig.ends[0].reports.append(Notification("p", b"from before"))
    rig.ends[1].reports.append(Notification("p", b"from now on"))
    assert len(rig.transport.poll()) == 2
    rig.transport.retire("end-1")
    rig.transport.retire("end-0")
    rig.transport.poll()
    assert rig.open_ends == ["end-1"], "to which new peers are introduced"
    rig.add("a")
    rig.fail_write("a")
    assert rig.add("a") == "end-2"
    rig.transport.poll()
    assert rig.open_ends == ["end-1", "end-2"], "new peers still write to the former"


def test_where_no_end_can_be_opened_the_newest_is_used_again(rig: Rig) -> None:
    rig.add("a")
    rig.may_open = False
    rig.fail_write("a")
    assert rig.add("a") == "end-0"
    assert not rig.transport.renew("end-0")


def test_ends_have_a_limit(rig: Rig) -> None:
    for number in range(2 * MAX_ENDS):
        rig.add(f"keeps end {number}")
        rig.add("a")
        rig.fail_write("a")
    assert len(rig.open_ends) == MAX_ENDS
    assert rig.transport.disconnect({"10.0.0.1"}) == MAX_ENDS
    rig.transport.close()
    assert rig.open_ends == []


def test_an_end_that_cannot_serve_the_pool_is_closed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: FakeTransport, pool: PoolMemory) -> None:
        raise TransferError("no room")

    rig.add("a")
    rig.fail_write("a")
    monkeypatch.setattr(FakeTransport, "register", fail)
    assert rig.add("a") == "end-0"
    assert rig.open_ends == ["end-0"]


def test_a_new_end_learns_that_data_is_expected(rig: Rig) -> None:
    rig.transport.expect(True)
    rig.add("a")
    rig.fail_write("a")
    assert rig.add("a") == "end-1"
    rig.transport.expect(False)
    assert [each.expected for each in rig.ends] == [[True, False]] * 2
