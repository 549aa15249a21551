"""Nodes of a worker join its head over sockets of this host, and are lost."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from kv_transfer.transports.distant_end import open_ends
from kv_transfer.transports.end_messages import Opened, OpenEnd, encode
from process.sockets.encrypted_sockets import Network
from protocol.errors import ConfigError
from protocol.rank_messages import (
    EndBytes,
    HeadBeat,
    NodeBeat,
    NodeEnds,
    NodeLeaves,
    RankBytes,
    WorkerEnds,
)
from worker.ranks.node_link import HeadLost, NodeLink
from worker.ranks.other_nodes import OtherNodes

SECRET, DEADLINE_S = "a secret of this test", 20.0
TERMS = {"dtype": "float32", "nnodes": "2"}


class Head:
    """A head that waits for a node with each of these ranges of ranks."""

    def __init__(self, silence_s: float, ranks: Sequence[range]) -> None:
        self.network = Network(SECRET)
        self.was_told_to_leave = threading.Event()
        self.nodes = OtherNodes(
            self.network,
            "tcp://127.0.0.1:*",
            ranks,
            TERMS,
            silence_s,
            self.was_told_to_leave.set,
        )


@pytest.fixture
def head() -> Iterator[Head]:
    with running(DEADLINE_S) as one:
        yield one


@contextmanager
def running(silence_s: float, *ranks: range) -> Iterator[Head]:
    one = Head(silence_s, ranks or (range(1, 3),))
    try:
        yield one
    finally:
        one.nodes.close()
        one.network.close()


@contextmanager
def link_to(head: Head, secret: str = SECRET) -> Iterator[NodeLink]:
    network = Network(secret)
    link = NodeLink(network, head.nodes.endpoint, "the head's address")
    try:
        yield link
    finally:
        link.close()
        network.close()


def join(link: NodeLink, node: int = 1, **terms: str) -> None:
    link.join(node, "192.0.2.1", {**TERMS, **terms}, DEADLINE_S)


def closes(end: socket.socket) -> bool:
    end.settimeout(DEADLINE_S)
    return end.recv(1) == b""


def test_ranks_and_head_tell_each_other_bytes(head: Head) -> None:
    with link_to(head) as link:
        join(link)
        assert head.nodes.wait_for_all(DEADLINE_S) == []
        first, second = head.nodes.links()
        link.send(RankBytes(rank=2, data=b"up"))
        second.settimeout(DEADLINE_S)
        assert second.recv(10) == b"up"
        first.sendall(b"down")
        found: list[object] = []
        while not any(isinstance(each, RankBytes) for each in found):
            assert link.socket.poll(DEADLINE_S * 1e3)
            found += link.receive()
        assert RankBytes(rank=1, data=b"down") in found
        noted = threading.Event()
        head.nodes.note_times = lambda rank, lines: (
            noted.set() if (rank, list(lines)) == (1, [7]) else None
        )
        link.send(NodeBeat(nonce=1, times=[7]))
        assert noted.wait(DEADLINE_S)
        link.send(NodeLeaves())
        assert head.was_told_to_leave.wait(DEADLINE_S)
        head.nodes.close("because")
        while WorkerEnds(reason="because") not in found:
            assert link.socket.poll(DEADLINE_S * 1e3)
            found += link.receive()


def test_ends_and_head_tell_each_other_orders_and_reports(head: Head) -> None:
    (host,) = head.nodes.hosts
    with link_to(head) as link, ThreadPoolExecutor(1) as threads:
        join(link)
        assert head.nodes.wait_for_all(DEADLINE_S) == []
        opened = threads.submit(open_ends, [host], DEADLINE_S)
        found: list[object] = []
        while EndBytes(data=encode(OpenEnd(0))) not in found:
            assert link.socket.poll(DEADLINE_S * 1e3)
            found += link.receive()
        before = time.monotonic()
        link.send(NodeBeat(nonce=5, times=[]))
        link.send(EndBytes(data=b"of no use"))
        link.send(EndBytes(data=encode(Opened(0, "far", b"where", 2))))
        assert [end.agent for end in opened.result(DEADLINE_S)] == ["far"]
        nonce, came_at = host.beat
        assert nonce == 5
        assert before <= came_at <= time.monotonic()
        assert head.nodes.reason == ""


@pytest.mark.parametrize(
    ("node", "terms", "said"),
    [
        (
            1,
            {"dtype": "bfloat16"},
            "dtype is float32 at the head and bfloat16 at node 1: start all",
        ),
        (2, {}, "node_rank 2: nodes beside the head have 1 to 1"),
        (0, {}, "node_rank 0: nodes beside the head have 1 to 1"),
    ],
)
def test_a_node_that_does_not_fit_is_refused_and_may_try_again(
    head: Head, node: int, terms: dict[str, str], said: str
) -> None:
    with link_to(head) as link, pytest.raises(ConfigError, match=said):
        join(link, node, **terms)
    assert head.nodes.wait_for_all(0.0) == [1]
    with link_to(head) as link:
        join(link)
        assert head.nodes.wait_for_all(DEADLINE_S) == []
        with link_to(head) as another, pytest.raises(ConfigError, match="has joined already"):
            join(another)


def test_a_node_that_starts_again_before_all_have_joined_takes_its_place(head: Head) -> None:
    with link_to(head) as link, link_to(head) as another:
        join(link)
        former = head.nodes.links()
        join(another)
        assert [each.fileno() for each in former] == [-1, -1]
        assert head.nodes.wait_for_all(DEADLINE_S) == []
        another.send(RankBytes(rank=1, data=b"up"))
        first, _ = head.nodes.links()
        first.settimeout(DEADLINE_S)
        assert first.recv(10) == b"up"


def test_a_node_that_ends_before_all_have_joined_is_awaited_again() -> None:
    with running(DEADLINE_S, range(1, 2), range(2, 3)) as head:
        with link_to(head) as link:
            join(link)
            assert head.nodes.wait_for_all(0.0) == [2]
            link.send(NodeEnds(reason="rank 1 has ended by signal 9"))
            end = time.monotonic() + DEADLINE_S
            while head.nodes.wait_for_all(0.01) != [1, 2]:
                assert time.monotonic() < end
        with link_to(head) as link, link_to(head) as another:
            join(link, 1)
            join(another, 2)
            assert head.nodes.wait_for_all(DEADLINE_S) == []
            assert head.nodes.reason == ""


def test_a_head_beats_by_time_and_not_with_each_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.ranks.other_nodes.BEAT_S", 1e6)
    with running(DEADLINE_S) as head, link_to(head) as link:
        join(link)
        assert head.nodes.wait_for_all(DEADLINE_S) == []
        first, _ = head.nodes.links()
        first.settimeout(DEADLINE_S)
        found: list[object] = []
        for _ in range(10):
            link.send(RankBytes(rank=1, data=b"."))
            assert first.recv(1) == b"."
            found += link.receive()
        assert sum(isinstance(each, HeadBeat) for each in found) <= 1


def test_a_node_with_another_secret_is_told_so(head: Head) -> None:
    with (
        link_to(head, "a secret of another cluster") as link,
        pytest.raises(ConfigError, match="is no head of this cluster: give all nodes"),
    ):
        join(link)
    assert head.nodes.wait_for_all(0.0) == [1]


def test_a_head_that_is_not_there_is_named_with_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        network = Network(SECRET)
        link = NodeLink(network, f"tcp://127.0.0.1:{taken.getsockname()[1]}", "192.0.2.1:7")
        with pytest.raises(ConfigError, match=r"no head answers at 192.0.2.1:7 after 1 s: start"):
            link.join(1, "192.0.2.2", TERMS, 1.0)
        link.close()
        network.close()


@pytest.mark.parametrize("how", ["ends", "closes", "silent"])
def test_a_lost_node_closes_the_links_of_its_ranks(how: str) -> None:
    said = {
        "ends": r"node 1 \(192.0.2.1\) has ended: rank 2 has ended by signal 9",
        "closes": r"node 1 \(192.0.2.1\) has closed the connection",
        "silent": r"node 1 \(192.0.2.1\) has said nothing for 1 s",
    }
    with running(1.0 if how == "silent" else DEADLINE_S) as head, link_to(head) as link:
        join(link)
        assert head.nodes.wait_for_all(DEADLINE_S) == []
        links = head.nodes.links()
        if how == "ends":
            link.send(NodeEnds(reason="rank 2 has ended by signal 9"))
            link.send(NodeEnds(reason="what follows from that"))
        elif how == "closes":
            link.socket.disable_monitor()
            link.socket.close(linger=0)
        assert all(map(closes, links))
        head.nodes.close()
        assert re.fullmatch(said[how], head.nodes.reason)


def test_a_node_hears_that_its_head_is_gone(head: Head) -> None:
    with link_to(head) as link:
        join(link)
        head.nodes.close()
        head.network.close()
        assert link.monitor.poll(DEADLINE_S * 1e3)
        with pytest.raises(HeadLost, match="the head's address has closed the connection"):
            link.check()
