"""Peers that die, stop or are not what they say, over every transport; and nothing stays behind."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from kv_transfer.authentication import authenticate_descriptor, verify_descriptor
from protocol.errors import ProtocolError, TransferError
from tests.integration.transport_workers import (
    ServiceWorker,
    TransportWorker,
    Worker,
    connect,
    wait_until,
)


def write_until_it_fails(sender: Worker, agent: str, num_blocks: int) -> str:
    """Write all blocks again and again; returns the error that ends it."""
    blocks = list(range(num_blocks))

    def failed() -> str | None:
        try:
            return sender.write_and_wait(agent, blocks, blocks, b"again")
        except TransferError as error:
            return str(error)

    return wait_until(failed, "failing write")


def test_a_killed_peer_is_an_error_and_its_successor_works(spawn: Callable[..., Worker]) -> None:
    sender = spawn(TransportWorker, 64, 256 * 1024)
    receiver = spawn(TransportWorker, 64, 256 * 1024)
    agent = connect(sender, receiver)
    sender.fill(list(range(64)), 8)
    blocks = list(range(64))
    assert sender.write_and_wait(agent, blocks, blocks, b"alive") is None

    under_way = [sender.write(agent, blocks, blocks, b"under way") for _ in range(4)]
    receiver.kill()
    for handle in under_way:  # done before or failed after the kill: but over
        wait_until(lambda h=handle: sender.write_done(h), "end of a write")
    assert write_until_it_fails(sender, agent, 64)
    sender.remove_peer(agent)

    successor = spawn(TransportWorker, 64, 256 * 1024)
    new_agent = connect(sender, successor)
    assert new_agent != agent
    assert sender.write_and_wait(new_agent, blocks, blocks, b"successor") is None
    successor.wait_for_note(b"successor")
    assert successor.read(blocks) == sender.read(blocks)


def test_a_killed_sender_leaves_the_receiver_working(spawn: Callable[..., Worker]) -> None:
    first, second, receiver = spawn(), spawn(), spawn()
    agent = connect(first, receiver)
    assert first.write_and_wait(agent, [0], [0], b"first") is None
    receiver.wait_for_note(b"first")
    first.kill()

    agent = connect(second, receiver)
    second.fill([1], 9)
    assert second.write_and_wait(agent, [1], [1], b"second") is None
    receiver.wait_for_note(b"second")
    assert receiver.read([1]) == second.read([1])


def test_a_peer_may_be_removed_and_added_again(spawn: Callable[..., Worker]) -> None:
    sender, receiver = spawn(), spawn()
    agent = connect(sender, receiver)
    assert sender.write_and_wait(agent, [0], [0], b"before") is None
    sender.remove_peer(agent)
    with pytest.raises(TransferError, match="not known"):
        sender.write(agent, [0], [1], b"between")

    assert connect(sender, receiver) == agent
    assert sender.write_and_wait(agent, [0], [2], b"after") is None
    receiver.wait_for_note(b"after")


class HastyWorker(ServiceWorker):
    """Does not wait for long, but long enough for a peer on a busy machine."""

    write_timeout_s = 5.0


def test_a_stopped_peer_costs_the_deadline_and_can_be_added_again(
    spawn: Callable[..., Worker],
) -> None:
    sender = spawn(HastyWorker, 64, 256 * 1024)
    receiver = spawn(TransportWorker, 64, 256 * 1024)
    agent = connect(sender, receiver)
    blocks = list(range(64))
    assert sender.write_and_wait(agent, blocks, blocks, b"alive") is None

    os.kill(receiver.process.pid, signal.SIGSTOP)
    notes = [b"stopped %d" % i + bytes(32_000) for i in range(40)]  # more than a queue holds
    handles = [sender.write(agent, blocks, blocks, note) for note in notes]
    for handle in handles:
        wait_until(lambda h=handle: sender.write_done(h), "end of a write")
    assert any(sender.all_done()[handle] for handle in handles)
    assert "took longer" in sender.peer_state(agent)
    os.kill(receiver.process.pid, signal.SIGCONT)

    connect(sender, receiver)
    sender.fill(blocks, 10)
    assert sender.write_and_wait(agent, blocks, blocks, b"again") is None
    receiver.wait_for_note(b"again")
    assert receiver.read(blocks) == sender.read(blocks)


def test_a_corrupt_descriptor_is_refused_before_the_transport_sees_it(
    spawn: Callable[..., Worker],
) -> None:
    sender, receiver = spawn(), spawn()
    agent, descriptor, num_blocks = receiver.introduce()
    secret = b"of the fleet"
    digest = authenticate_descriptor(secret, agent, descriptor, num_blocks)
    middle = len(descriptor) // 2
    corrupt = bytearray(descriptor)
    corrupt[middle] ^= 1

    with pytest.raises(ProtocolError, match="not authentic"):
        verify_descriptor(secret, agent, bytes(corrupt), num_blocks, digest)
    with pytest.raises(ProtocolError, match="not authentic"):
        verify_descriptor(secret, "another", descriptor, num_blocks, digest)
    verify_descriptor(secret, agent, descriptor, num_blocks, digest)
    assert connect(sender, receiver) == agent
    assert sender.write_and_wait(agent, [0], [0], b"fine") is None


def test_descriptors_that_do_not_fit_are_refused(spawn: Callable[..., Worker]) -> None:
    sender = spawn()
    receiver = spawn(TransportWorker, 16, 8192)
    agent, descriptor, num_blocks = receiver.introduce()
    with pytest.raises(TransferError, match="4096"):
        sender.add_peer(agent, descriptor, num_blocks)
    fitting = spawn()
    agent, descriptor, num_blocks = fitting.introduce()
    with pytest.raises(TransferError, match="expected 15 blocks of 4096 bytes"):
        sender.add_peer(agent, descriptor, num_blocks - 1)
    with pytest.raises(TransferError):
        sender.add_peer("0123456789abcdef", descriptor, num_blocks)
    with pytest.raises(TransferError):
        sender.add_peer(agent, b"\x00 nothing of ours", num_blocks)
    with pytest.raises(TransferError, match="own peer"):
        sender.add_peer(*sender.introduce())
    assert connect(sender, fitting) == agent
    assert sender.write_and_wait(agent, [0], [0], b"fine") is None


class LeakCheck:
    """Opens and closes services in its process and compares what is left."""

    def __init__(self, name: str, num_blocks: int, block_bytes: int) -> None:
        self.name = name
        self.shape = (num_blocks, block_bytes)

    def step(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def cycle(self, agent: str, descriptor: bytes, num_blocks: int) -> dict[str, list[str]]:
        """One life of a service that writes to a peer; returns what the process holds after."""
        worker = ServiceWorker(self.name, *self.shape)
        worker.add_peer(agent, descriptor, num_blocks)
        key = worker.write(agent, [0], [0], b"cycle")
        assert wait_until(partial(_step_until_done, worker, key), "end of a write") == (None,)
        worker.stop()
        del worker
        gc.collect()
        return {
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "tasks": sorted(_tasks_when_threads_have_ended()),
            "fds": sorted(_open_files()),
        }


def _step_until_done(worker: ServiceWorker, key: int) -> tuple[str | None] | None:
    worker.step()
    return worker.write_done(key)


def _tasks_when_threads_have_ended() -> list[str]:
    """Linux may list a thread for a moment after it was joined; one that stays is listed here."""
    deadline = time.monotonic() + 60.0
    while len(_names_of_tasks()) > threading.active_count() and time.monotonic() < deadline:
        os.sched_yield()
    return _names_of_tasks()


def _open_files() -> list[str]:
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}").split(":")[0])
        except FileNotFoundError:
            continue  # the listing's own
    return links


def _names_of_tasks() -> list[str]:
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as file:
                names.append(file.read().strip())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended since it was listed
    return names


def test_closing_leaves_nothing_behind(spawn: Callable[..., Worker]) -> None:
    receiver, checker = spawn(), spawn(LeakCheck)
    first = checker.cycle(*receiver.introduce())
    later = [checker.cycle(*receiver.introduce()) for _ in range(3)][-1]
    assert later == first
    assert first["threads"] == ["MainThread"]
