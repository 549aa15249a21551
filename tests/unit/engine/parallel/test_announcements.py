"""How a rank waits for what the leader announces."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from engine.parallel import ranks
from engine.parallel.ranks import _look, _read
from engine.parallel.sums import RankLost

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    leader, follower = socket.socketpair()
    with leader, follower:
        yield leader, follower


@pytest.fixture
def no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_LOOK_S", 60.0)


@pytest.mark.usefixtures("no_sleep")
def test_data_that_comes_ends_the_look_and_is_not_taken(ends: Ends) -> None:
    leader, follower = ends
    later = threading.Timer(0.02, leader.sendall, [b"step"])
    later.start()
    _look(follower)
    later.join()
    assert _read(follower, 4) == b"step"


@pytest.mark.usefixtures("no_sleep")
@pytest.mark.parametrize("is_reset", [False, True])
def test_the_end_of_the_leader_ends_the_look(ends: Ends, is_reset: bool) -> None:
    leader, follower = ends
    if is_reset:
        follower.sendall(b"unread")
    leader.close()
    _look(follower)
    with pytest.raises(RankLost):
        _read(follower, 4)


def test_a_rank_that_looked_for_a_while_sleeps(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[None] = []
    monkeypatch.setattr(os, "sched_yield", lambda: looks.append(None))
    _look(ends[1])
    assert looks
