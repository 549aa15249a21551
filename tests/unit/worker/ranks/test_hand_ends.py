"""Ranks that each have a pool of their own move its blocks by ends of their own: a hand does what
the head orders once its own steps are over, and a hand that no longer answers ends its worker."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from engine.attention.base import Segment
from engine.fences import PASSED
from engine.kv_pool import KvPool
from engine.loader import load_engine
from engine.parallel.blocks_under_way import BlocksUnderWay
from engine.parallel.ranks import Step
from kv_transfer.head_slices import plan_shares
from kv_transfer.transports.distant_end import open_ends
from kv_transfer.transports.end_messages import (
    AddPeer,
    Disconnect,
    Disconnected,
    Opened,
    OpenEnd,
    decode_report,
    encode,
)
from kv_transfer.transports.framed_stream import FramedStream
from kv_transfer.transports.interface import Notification, PeerReady, PoolMemory, WriteDone
from kv_transfer.transports.joined import JoinedTransport
from kv_transfer.transports.nixl import NixlTransport
from tests.forked_tests import with_forked_hands
from tests.integration.pool_ends import PoolEnd, poll_until
from tests.unit.kv_transfer.fake_transport import FakeTransport
from tests.unit.worker.ranks.test_hands import CONFIG, DEADLINE_S, Group, generate
from worker.ranks import end_links
from worker.ranks.end_links import BEAT, MOST_BYTES, EndLinks
from worker.ranks.end_thread import EndThread
from worker.ranks.pool_memory import pool_memory

CPUS = ("cpu", "cpu")
BEAT_FRAME = bytes(4)
"""An empty frame: its length."""
NUM_REPORTS = 5000
"""More than a socket holds."""


class Pool(PoolEnd):
    """A pool and its transport, which has the ends in these hands, too."""

    def __init__(self, pool: KvPool, group: Group | None = None) -> None:
        hosts = () if group is None else group.hands.hosts
        first = NixlTransport(os.urandom(4).hex(), "cpu")
        super().__init__(JoinedTransport(first, partial(open_ends, hosts)))
        self.pool = pool
        self.transport.register(pool_memory(pool))

    def write_to(self, other: Pool, blocks: list[int]) -> None:
        """Write blocks to those with the same numbers. Returns when the write is over."""
        transport, agent = other.transport, other.transport.agent
        shares = plan_shares(self.pool.layout, other.pool.layout)
        num_blocks = other.pool.num_blocks
        self.transport.add_peer(agent, transport.descriptor(), num_blocks, shares)
        poll_until(PeerReady, self, other)
        self.transport.post_write(agent, blocks, blocks, b"landed")
        poll_until(Notification, other, self)
        poll_until(WriteDone, self, other)
        assert [each.error for each in self.events if isinstance(each, WriteDone)] == [None]


@pytest.mark.parametrize("num_stages", [1, 2])
@with_forked_hands(1)
def test_blocks_of_all_ranks_leave_and_arrive(num_stages: int) -> None:
    alone = load_engine(CONFIG, time.monotonic)
    expected = generate(alone)
    with Group(num_stages, devices=CPUS, transport="nixl") as group:
        loaded = group.load()
        assert not loaded.pool.has_all_ranks
        assert generate(loaded) == expected
        whole = alone.pool.layout
        ours, copy, back = (KvPool(whole, alone.pool.num_blocks) for _ in range(3))
        ends = Pool(loaded.pool, group), Pool(copy), Pool(ours), Pool(back)
        apart, far, near, last = ends
        blocks = list(range(loaded.pool.num_blocks))
        apart.write_to(far, blocks)
        assert torch.allclose(copy.tensor, alone.pool.tensor, atol=1e-5)
        assert copy.tensor.any()
        ours.tensor.normal_()
        near.write_to(apart, blocks)
        apart.events.clear()
        apart.write_to(last, blocks)
        assert torch.equal(back.tensor, ours.tensor)
        for end in ends:
            end.transport.close()
        group.hands.close()
        assert group.told == []


@with_forked_hands(1)
def test_a_hand_that_no_longer_answers_ends_its_worker() -> None:
    with Group(devices=CPUS, transport="nixl", silence_s=1.0) as group:
        group.load()
        (end,) = open_ends(group.hands.hosts)
        assert end.num_ranks == 1
        group.hand.send_signal(signal.SIGSTOP)
        assert group.was_told.wait(DEADLINE_S)
        assert group.told == ["rank 1 has not answered for 1 s"]
        group.hand.kill()  # or the end would wait for it


@with_forked_hands(1)
def test_a_hand_whose_ends_fail_ends_with_its_worker() -> None:
    with Group(devices=CPUS, transport="nixl") as group:
        group.load()
        group.hands.hosts[0]._send(b"\xc1")
        assert group.was_told.wait(DEADLINE_S)
        assert group.told == ["rank 1 of 2 has ended with status 1"]


class End(FakeTransport):
    """Says which blocks were written."""

    def __init__(self) -> None:
        super().__init__("far")
        self.posted: SimpleQueue[object] = SimpleQueue()

    def post_write(self, *arguments: Any) -> int:
        self.posted.put(arguments[1])
        handle = super().post_write(*arguments)
        self.finish(handle)
        return handle


class Rig:
    """Both sides of a link in one process, whose hand has an end that a test sees."""

    def __init__(self) -> None:
        self.end = End()
        self.under_way = BlocksUnderWay(4)
        self.lost: SimpleQueue[str] = SimpleQueue()
        self.sockets = socket.socketpair()
        pool = PoolMemory(4096, 64, 8, "cpu")
        self.thread = EndThread(
            self.sockets[1], lambda: self.end, pool, self.under_way, self.lost.put
        )
        self.links = EndLinks([self.sockets[0]], 60.0, self.lost.put)

    def close(self) -> None:
        self.links.close()
        self.thread.close()
        for each in self.sockets:
            each.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()
    assert rig.lost.empty()


def test_a_hand_reads_no_block_that_its_device_still_writes(rig: Rig) -> None:
    (end,) = open_ends(rig.links.hosts)
    end.add_peer("peer", b"where", 8)
    rig.under_way.begin(Step.of([Segment(4, 8, [5, 6])], [0] * 4))
    end.post_write("peer", [6], [1], 0, float("inf"))
    end.post_write("peer", [5], [1], 0, float("inf"))
    assert rig.end.posted.get(timeout=DEADLINE_S) == [5]
    rig.under_way.end(PASSED)
    assert rig.end.posted.get(timeout=DEADLINE_S) == [6]


def test_orders_name_times_of_the_common_clock(rig: Rig) -> None:
    (end,) = open_ends(rig.links.hosts)
    end.add_peer("peer", b"where", 8)
    late = end.post_write("peer", [1], [1], 0, time.monotonic())
    end.post_write("peer", [2], [1], 0, time.monotonic() + DEADLINE_S)
    assert rig.end.posted.get(timeout=DEADLINE_S) == [2]
    events: list[object] = []
    while len(events) < 3:
        events += end.poll()
    assert WriteDone(late, "our grant ended before it was posted") in events


@pytest.mark.parametrize("report", [b"\x01\0\0\0\xc1", b"\xff" * 4], ids=["unknown", "too long"])
def test_an_invalid_report_of_a_hand_ends_its_worker(report: bytes) -> None:
    with linked() as (theirs, lost):
        theirs.sendall(report)
        assert "rank 1 sent an invalid report" in lost.get(timeout=DEADLINE_S)


def test_a_hand_is_lost_by_its_unanswered_beats_and_not_by_a_pause_of_the_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The head's clock leaps by a minute at each look, as if the head was suspended each time. A
    hand that still loads answers nothing."""
    monkeypatch.setattr(end_links, "_PERIOD_MS", 1)
    clock = count(step=60)
    with linked(silence_s=2.0, clock=lambda: float(next(clock))) as (theirs, lost):
        for _ in range(20):
            assert theirs.recv(len(BEAT_FRAME), socket.MSG_WAITALL) == BEAT_FRAME
        assert lost.empty()
        theirs.sendall(BEAT_FRAME)
        assert lost.get(timeout=DEADLINE_S) == "rank 1 has not answered for 2 s"
        theirs.setblocking(False)
        assert len(theirs.recv(65536)) > 4 * len(BEAT_FRAME), "beats of 2 s, and one more"


def test_a_head_beats_by_time_and_not_with_each_order() -> None:
    now = [0.0]
    ours, theirs = socket.socketpair()
    links = EndLinks([ours], DEADLINE_S, lambda reason: None, lambda: now[0])
    hand = FramedStream(theirs, MOST_BYTES)
    frames: list[bytes] = []
    for number in range(5):
        links.hosts[0].begin_end()
        frames += frames_until(hand, encode(OpenEnd(number)))
    assert frames.count(BEAT) <= 1, "the first, which may come with any order"
    now[0] = 0.5
    links.hosts[0].begin_end()
    assert BEAT in frames_until(hand, encode(OpenEnd(5)), BEAT)
    links.close()
    ours.close()
    hand.close()


def frames_until(hand: FramedStream, *wanted: bytes) -> list[bytes]:
    """What a hand gets until all these frames have come."""
    frames: list[bytes] = []
    while not set(wanted) <= set(frames):
        assert select.select([hand.socket], [], [], DEADLINE_S)[0]
        frames += hand.receive()
    return frames


def test_orders_that_a_link_does_not_take_at_once_wait_for_room_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(end_links, "_PERIOD_MS", -1)  # no end of a period helps
    ours, theirs = socket.socketpair()
    links = EndLinks([ours], DEADLINE_S, lambda reason: None, lambda: 0.0)
    hand = FramedStream(theirs, MOST_BYTES)
    large = encode(AddPeer(0, "peer", bytes(4 << 20), 8, ()))
    links.hosts[0].tell(AddPeer(0, "peer", bytes(4 << 20), 8, ()))
    assert large in frames_until(hand, large)
    links.close()
    ours.close()
    hand.close()


def test_reports_reach_the_ends_of_the_hand_that_sent_them() -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    hands = [FramedStream(theirs, MOST_BYTES) for _, theirs in pairs]
    links = EndLinks([ours for ours, _ in pairs], DEADLINE_S, lambda reason: None)
    with ThreadPoolExecutor(1) as threads:
        opened = threads.submit(open_ends, links.hosts, DEADLINE_S)
        for hand, name in zip(hands, ("first", "second"), strict=True):
            frames_until(hand, encode(OpenEnd(0)))
            hand.queue(encode(Opened(0, name, b"where", 1)))
            hand.flush()
        assert [each.agent for each in opened.result(DEADLINE_S)] == ["first", "second"]
    links.close()
    for each in (*pairs[0], *pairs[1]):
        each.close()


def test_a_hand_closes_its_ends_when_its_head_is_gone(rig: Rig) -> None:
    open_ends(rig.links.hosts)
    rig.links.close()
    rig.sockets[0].close()
    rig.thread._thread.join(DEADLINE_S)
    assert rig.end.is_closed


def test_reports_that_a_link_does_not_take_at_once_wait_for_room_alone(rig: Rig) -> None:
    open_ends(rig.links.hosts)
    rig.links.close()
    order = encode(Disconnect(0, []))
    rig.sockets[0].settimeout(DEADLINE_S)
    rig.sockets[0].sendall((len(order).to_bytes(4, "little") + order) * NUM_REPORTS)
    head = FramedStream(rig.sockets[0], MOST_BYTES)
    reports: list[bytes] = []
    while len(reports) < NUM_REPORTS:
        assert select.select([head.socket], [], [], DEADLINE_S)[0]
        reports += [each for each in head.receive() if each != BEAT]
    assert set(map(decode_report, reports)) == {Disconnected(0)}


@contextmanager
def linked(
    silence_s: float = DEADLINE_S, clock: Callable[[], float] = time.monotonic
) -> Iterator[tuple[socket.socket, SimpleQueue[str]]]:
    """The other end of a link, and the reasons for which its hand was lost."""
    ours, theirs = socket.socketpair()
    lost: SimpleQueue[str] = SimpleQueue()
    links = EndLinks([ours], silence_s, lost.put, clock)
    try:
        yield theirs, lost
    finally:
        links.close()
        ours.close()
        theirs.close()


def test_a_hand_that_ends_is_left_to_the_watch_of_links() -> None:
    """The thread goes on with the other hands."""
    pairs = [socket.socketpair() for _ in range(2)]
    lost: SimpleQueue[str] = SimpleQueue()
    links = EndLinks([ours for ours, _ in pairs], 60.0, lost.put)
    pairs[0][1].close()
    links.hosts[1].begin_end()
    came = b""
    while encode(OpenEnd(0)) not in came:
        came += pairs[1][1].recv(64)
    links.close()
    assert lost.empty()
    for each in (*pairs[0], *pairs[1]):
        each.close()
