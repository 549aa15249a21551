"""What the head sends to a hand: messages with an open file, and parts of memory."""

from __future__ import annotations

import os
import socket

import pytest

from engine.parallel.sums import RankLost
from kv_transfer.transports.memory_file import SharedMemory
from worker.ranks.link import Place, mapped, receive, send


@pytest.mark.parametrize("start", [0, 1, 4095, 4096, 5000])
def test_a_part_of_memory_is_shared_wherever_it_begins(start: int) -> None:
    memory = SharedMemory(10_000)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send(ours, Place(memory.offset + start, 3000), memory.file)
        place, (file,) = receive(theirs)
    part = mapped(file, place)
    assert len(part) == 3000
    memory.view[start], memory.view[start + 2999] = 7, 9
    assert (part[0], part[2999]) == (7, 9)
    part[5] = 3
    assert memory.view[start + 5] == 3
    memory.close()


def test_large_messages_arrive_whole() -> None:
    file = os.open(os.devnull, os.O_RDONLY)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send(ours, Place(1, 2), file)
        send(ours, Place(3, 4), file)
        first, second = receive(theirs), receive(theirs)
    assert [each for each, _ in (first, second)] == [Place(1, 2), Place(3, 4)]
    for each in (file, *first[1], *second[1]):
        os.close(each)


def test_an_end_that_closes_is_lost() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs, pytest.raises(RankLost, match="gone"):
        receive(theirs)
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(RankLost, match="gone"):
        send(ours, Place(0, 1), 0)
