"""A node of a worker gives its hands their memory, and its head hears from it meanwhile."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from kv_transfer.transports.memory_file import SharedMemory
from process.wakeup import Wakeup
from protocol.errors import ConfigError
from tests.integration.fleets import wait_for
from tests.unit.worker.ranks.test_other_nodes import DEADLINE_S, Head, join, link_to, running
from worker.ranks.link import Place, Wanted, receive, send
from worker.ranks.node import Node

NUM_BYTES = 4096
NO_MEMORY = "cannot reserve 4096 bytes of shared memory"


class OneHand:
    """Stands for the process of a node's only hand, for what it shares with others, and for a node
    that nobody has told to stop. `end` is the hand's end of its link."""

    numbers = range(1, 2)
    is_set = False

    def __init__(self) -> None:
        link, self.end = socket.socketpair()
        steps, self._steps_end = socket.socketpair()
        self.links, self.steps = [link], [steps]
        self.end.settimeout(DEADLINE_S)

    def times_of(self, numbers: range) -> list[int]:
        return []

    def give(self, memory: SharedMemory) -> None:
        send(self.links[0], Place.of(memory), memory.file)

    def close(self) -> None:
        for each in (*self.links, *self.steps, self.end, self._steps_end):
            each.close()


class Running(NamedTuple):
    head: Head
    hand: OneHand
    reason: Future[str]
    """Why the node has ended."""


@contextmanager
def running_node() -> Iterator[Running]:
    wakeup, hand = Wakeup(), OneHand()
    with running(DEADLINE_S, hand.numbers) as head, link_to(head) as link:
        join(link)
        assert head.nodes.wait_for_all(DEADLINE_S) == []
        parts: Any = (link, hand, hand, DEADLINE_S, hand, wakeup)
        node = Node(*parts)
        with ThreadPoolExecutor(1) as threads:
            yield Running(head, hand, threads.submit(node.run, pytest.fail))
            head.nodes.close()
        node.close()
    wakeup.close()


def test_a_node_beats_while_it_takes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def take_long(num_bytes: int) -> SharedMemory:
        begun.set()
        assert may_end.wait(DEADLINE_S)
        return SharedMemory(num_bytes)

    monkeypatch.setattr("worker.ranks.node.SharedMemory", take_long)
    monkeypatch.setattr("worker.ranks.node.BEAT_S", 0.01)
    with running_node() as (head, hand, reason):
        (host,) = head.nodes.hosts
        send(hand.end, Wanted(NUM_BYTES))
        assert begun.wait(DEADLINE_S)
        first, _ = host.beat
        wait_for("two more beats", lambda: host.beat[0] >= first + 2, DEADLINE_S)
        may_end.set()
        place, (file,) = receive(hand.end)
        assert place.num_bytes == NUM_BYTES
        os.close(file)
        head.nodes.close()
        assert reason.result(DEADLINE_S) == ""


def test_a_head_hears_that_a_node_lacks_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def lack(num_bytes: int) -> SharedMemory:
        raise ConfigError(NO_MEMORY)

    monkeypatch.setattr("worker.ranks.node.SharedMemory", lack)
    with running_node() as (head, hand, reason):
        send(hand.end, Wanted(NUM_BYTES))
        assert reason.result(DEADLINE_S) == NO_MEMORY
        wait_for("the head to hear", lambda: head.nodes.reason, DEADLINE_S)
        assert head.nodes.reason == f"node 1 (192.0.2.1) has ended: {NO_MEMORY}"
