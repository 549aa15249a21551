"""The contract of every transport, between real processes.

Each test drives workers that are processes of their own (spawned), over a pipe: a worker polls
its transport all the time, keeps what it reports, and checks a notification's data on arrival.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from kv_transfer.authentication import authenticate_descriptor, verify_descriptor
from kv_transfer.service import TransferService
from kv_transfer.shm_segments import default_folder
from kv_transfer.transfer_loop import (
    NotificationArrived,
    PeerAdded,
    PeerFailed,
    WriteCommand,
    WriteFinished,
)
from kv_transfer.transport import (
    Notification,
    PoolMemory,
    Transport,
    WriteDone,
    create_transport,
)
from protocol.errors import ProtocolError, TransferError

DEADLINE_S = 30.0
WRITE_TIMEOUT_S = 1.0
EMPTY = 0xEE


def wait_until(ready: Callable[[], Any], what: str) -> Any:
    """Ask until the answer is true; every question is a round trip to another process."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if answer := ready():
            return answer
    pytest.fail(f"no {what} within {DEADLINE_S:g} s")


# -- the worker's process ----------------------------------------------------------------


class Pool:
    """Blocks of bytes, in memory of the transport if it asks for that."""

    def __init__(
        self, allocate: Callable[[int], memoryview | None], num_blocks: int, block_bytes: int
    ) -> None:
        memory = allocate(num_blocks * block_bytes)
        flat = np.zeros(num_blocks * block_bytes, np.uint8) if memory is None else memory
        self.blocks = np.frombuffer(flat, np.uint8).reshape(num_blocks, block_bytes)
        self.blocks[:] = EMPTY
        self.place = PoolMemory(self.blocks.ctypes.data, block_bytes, num_blocks, "cpu")

    def fill(self, blocks: list[int], seed: int) -> None:
        for block in blocks:
            self.blocks[block] = content(seed, block, self.place.block_bytes)

    def read(self, blocks: list[int]) -> list[bytes]:
        return [self.blocks[block].tobytes() for block in blocks]

    def occupied(self) -> list[int]:
        return np.flatnonzero((self.blocks != EMPTY).any(axis=1)).tolist()

    def complete(self) -> list[int]:
        return np.flatnonzero((self.blocks != EMPTY).all(axis=1)).tolist()


class TransportWorker:
    """Commands of a test, on a bare transport."""

    def __init__(self, name: str, num_blocks: int, block_bytes: int) -> None:
        self.transport: Transport = create_transport(name, "cpu")
        self.pool = Pool(self.transport.allocate, num_blocks, block_bytes)
        self.transport.register(self.pool.place)
        self.done: dict[int, str | None] = {}
        self.notes: list[tuple[str, bytes, list[int]]] = []  # with the blocks complete by then

    def step(self) -> None:
        for event in self.transport.poll():
            if isinstance(event, WriteDone):
                self.done[event.handle] = event.error
            elif isinstance(event, Notification):
                self.notes.append((event.agent, event.payload, self.pool.complete()))

    def introduce(self) -> tuple[str, bytes, int]:
        return self.transport.agent, self.transport.descriptor(), self.pool.place.num_blocks

    def add_peer(self, agent: str, descriptor: bytes, num_blocks: int) -> None:
        self.transport.add_peer(agent, descriptor, num_blocks)

    def remove_peer(self, agent: str) -> None:
        self.transport.remove_peer(agent)

    def write(self, agent: str, source: list[int], target: list[int], note: bytes) -> int:
        return self.transport.post_write(agent, source, target, note)

    def write_done(self, handle: int) -> tuple[str | None] | None:
        return (self.done[handle],) if handle in self.done else None

    def received(self) -> list[tuple[str, bytes, list[int]]]:
        return self.notes

    def fill(self, blocks: list[int], seed: int) -> None:
        self.pool.fill(blocks, seed)

    def read(self, blocks: list[int]) -> list[bytes]:
        return self.pool.read(blocks)

    def occupied(self) -> list[int]:
        return self.pool.occupied()

    def stop(self) -> None:
        self.transport.close()


class ServiceWorker(TransportWorker):
    """The same commands, through the service's thread."""

    def __init__(self, name: str, num_blocks: int, block_bytes: int) -> None:
        self.woken = threading.Event()
        self.service = TransferService(
            lambda: create_transport(name, "cpu"), self.woken.set, WRITE_TIMEOUT_S
        )
        self.service.start()
        self.pool = Pool(self.service.allocate, num_blocks, block_bytes)
        self.descriptor = self.service.register(self.pool.place)
        self.peers: dict[str, str] = {}
        self.done = {}
        self.notes = []
        self.next_key = 0
        self.service.expect(True)

    def step(self) -> None:
        if not self.woken.is_set():
            return
        self.woken.clear()
        for event in self.service.drain():
            match event:
                case PeerAdded(agent):
                    self.peers[agent] = "added"
                case PeerFailed(agent, reason):
                    self.peers[agent] = reason
                case WriteFinished(key, error, posted_us, done_us):
                    assert isinstance(key, int)
                    assert posted_us <= done_us
                    self.done[key] = error
                case NotificationArrived(agent, payload):
                    self.notes.append((agent, payload, self.pool.complete()))

    def introduce(self) -> tuple[str, bytes, int]:
        return self.service.agent, self.descriptor, self.pool.place.num_blocks

    def add_peer(self, agent: str, descriptor: bytes, num_blocks: int) -> None:
        self.peers.pop(agent, None)
        self.service.add_peer(agent, descriptor, num_blocks)

    def remove_peer(self, agent: str) -> None:
        self.service.remove_peer(agent)

    def peer_state(self, agent: str) -> str | None:
        return self.peers.get(agent)

    def write(self, agent: str, source: list[int], target: list[int], note: bytes) -> int:
        self.next_key += 1
        self.service.write(WriteCommand(self.next_key, agent, source, target, note))
        return self.next_key

    def all_done(self) -> dict[int, str | None]:
        return self.done

    def stop(self) -> None:
        self.service.close()


def content(seed: int, block: int, block_bytes: int) -> np.ndarray:
    """What a test expects in a block: different for every seed and block, EMPTY nowhere."""
    return np.random.default_rng([seed, block]).integers(0, 200, block_bytes, np.uint8)


def worker_main(conn: Connection, kind: type, *args: Any) -> None:
    """Carry out commands and poll in between, until told to stop."""
    worker = kind(*args)
    while True:
        worker.step()
        if not conn.poll(0.0002):
            continue
        command, arguments = conn.recv()
        try:
            conn.send((getattr(worker, command)(*arguments), None))
        except (TransferError, ValueError) as error:
            conn.send((None, error))
        if command == "stop":
            return


class Worker:
    """A worker's process, as a test sees it."""

    def __init__(self, kind: type, *args: Any) -> None:
        self.agent = ""  # once it has introduced itself
        context = multiprocessing.get_context("spawn")
        self._conn, theirs = context.Pipe()
        self.process = context.Process(target=worker_main, args=(theirs, kind, *args), daemon=True)
        self.process.start()
        theirs.close()

    def __getattr__(self, command: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self._conn.send((command, arguments))
            if not self._conn.poll(DEADLINE_S):
                pytest.fail(f"the worker does not answer {command}")
            answer, error = self._conn.recv()
            if error is not None:
                raise error
            if command == "introduce":
                self.agent = answer[0]
            return answer

        return call

    def write_and_wait(self, *arguments: Any) -> str | None:
        """The error of a write, or None."""
        handle = self.write(*arguments)
        return wait_until(lambda: self.write_done(handle), "end of a write")[0]

    def wait_for_note(self, payload: bytes) -> tuple[str, bytes, list[int]]:
        def found() -> list[Any]:
            return [note for note in self.received() if note[1] == payload]

        notes = wait_until(found, f"notification {payload!r}")
        assert len(notes) == 1
        return notes[0]

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(DEADLINE_S)

    def end(self) -> None:
        """Stop in order if it lives, and see the process end."""
        if self.process.is_alive():
            self.stop()
            self.process.join(DEADLINE_S)
            assert self.process.exitcode == 0
        self._conn.close()
        self.process.close()


@pytest.fixture(params=["nixl", "shm"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def spawn(name: str) -> Iterator[Callable[..., Worker]]:
    """Start workers of a kind; all are gone, with all their files, after the test."""
    workers: list[Worker] = []

    def start(
        kind: type = TransportWorker, num_blocks: int = 16, block_bytes: int = 4096
    ) -> Worker:
        workers.append(Worker(kind, name, num_blocks, block_bytes))
        return workers[-1]

    try:
        yield start
        for worker in workers:
            worker.end()
        create_transport("shm", "cpu").close()  # sweeps what the killed ones left
        left = [file for worker in workers if worker.agent for file in files_of(worker.agent)]
        assert left == []
    finally:
        for worker in workers:
            if worker.process._popen is not None and worker.process.is_alive():
                worker.process.kill()


def files_of(agent: str) -> list[str]:
    """What a transport's agent has in shared memory."""
    folder = default_folder()
    return sorted(path.name for path in folder.glob(f"{agent}.*")) if folder.exists() else []


def connect(sender: Worker, receiver: Worker) -> str:
    """Let one write to the other; returns the receiver's agent."""
    agent, descriptor, num_blocks = receiver.introduce()
    sender.add_peer(agent, descriptor, num_blocks)
    return agent


# -- writing -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ([3], [11]),
        ([0, 1, 2, 3], [4, 5, 6, 7]),
        ([9, 2, 15, 0, 4], [1, 14, 7, 8, 0]),
        (list(range(16)), list(reversed(range(16)))),
    ],
    ids=["one", "adjacent", "scattered", "whole pool reversed"],
)
def test_blocks_land_exact_and_nowhere_else(
    spawn: Callable[..., Worker], source: list[int], target: list[int]
) -> None:
    sender, receiver = spawn(), spawn()
    agent = connect(sender, receiver)
    sender.fill(list(range(16)), 1)

    assert sender.write_and_wait(agent, source, target, b"written") is None
    receiver.wait_for_note(b"written")

    assert receiver.read(target) == sender.read(source)
    assert receiver.occupied() == sorted(target)


@pytest.mark.parametrize("block_bytes", [8, 1000, 4 * 1024 * 1024])
def test_block_sizes(spawn: Callable[..., Worker], block_bytes: int) -> None:
    sender = spawn(TransportWorker, 6, block_bytes)
    receiver = spawn(TransportWorker, 6, block_bytes)
    agent = connect(sender, receiver)
    sender.fill([0, 1, 2, 3, 4, 5], 2)

    assert sender.write_and_wait(agent, [5, 0, 1, 4], [0, 2, 3, 5], b"sized") is None
    receiver.wait_for_note(b"sized")

    assert receiver.read([0, 2, 3, 5]) == sender.read([5, 0, 1, 4])
    assert receiver.occupied() == [0, 2, 3, 5]


def test_pools_may_differ_in_their_number_of_blocks(spawn: Callable[..., Worker]) -> None:
    sender = spawn(TransportWorker, 4, 4096)
    receiver = spawn(TransportWorker, 300, 4096)
    agent = connect(sender, receiver)
    sender.fill([3], 3)

    assert sender.write_and_wait(agent, [3], [299], b"far") is None
    receiver.wait_for_note(b"far")

    assert receiver.read([299]) == sender.read([3])
    with pytest.raises(TransferError, match="target block"):
        sender.write(agent, [0], [300], b"too far")
    with pytest.raises(TransferError, match="source block"):
        sender.write(agent, [4], [0], b"not ours")
    assert receiver.occupied() == [299]


def test_a_notification_comes_after_its_data(spawn: Callable[..., Worker]) -> None:
    num_blocks, block_bytes = 64, 256 * 1024
    sender = spawn(TransportWorker, num_blocks, block_bytes)
    receiver = spawn(TransportWorker, num_blocks, block_bytes)
    agent = connect(sender, receiver)
    sender.fill(list(range(num_blocks)), 4)

    handles = [
        sender.write(agent, [i, i + 1], [i, i + 1], b"pair %d" % i) for i in range(0, num_blocks, 2)
    ]
    for i in range(0, num_blocks, 2):
        writer, _, complete = receiver.wait_for_note(b"pair %d" % i)
        assert writer == sender.introduce()[0]
        assert {i, i + 1} <= set(complete)
    for handle in handles:
        assert wait_until(lambda h=handle: sender.write_done(h), "end of a write") == (None,)
    everything = list(range(num_blocks))
    assert receiver.read(everything) == sender.read(everything)


def test_both_directions_at_once(spawn: Callable[..., Worker]) -> None:
    one, other = spawn(), spawn()
    to_other, to_one = connect(one, other), connect(other, one)
    one.fill([0, 1, 2, 3], 5)
    other.fill([4, 5, 6, 7], 6)

    first = one.write(to_other, [0, 1, 2, 3], [8, 9, 10, 11], b"there")
    second = other.write(to_one, [4, 5, 6, 7], [12, 13, 14, 15], b"back")

    other.wait_for_note(b"there")
    one.wait_for_note(b"back")
    assert wait_until(lambda: one.write_done(first), "end of a write") == (None,)
    assert wait_until(lambda: other.write_done(second), "end of a write") == (None,)
    assert other.read([8, 9, 10, 11]) == one.read([0, 1, 2, 3])
    assert one.read([12, 13, 14, 15]) == other.read([4, 5, 6, 7])


def test_one_worker_writes_to_several(spawn: Callable[..., Worker]) -> None:
    sender = spawn()
    receivers = [spawn(), spawn()]
    sender.fill([0, 1], 7)
    for i, receiver in enumerate(receivers):
        agent = connect(sender, receiver)
        assert sender.write_and_wait(agent, [i], [i + 5], b"to you") is None
    for i, receiver in enumerate(receivers):
        receiver.wait_for_note(b"to you")
        assert receiver.occupied() == [i + 5]


def test_a_slow_reader_loses_no_notification(spawn: Callable[..., Worker]) -> None:
    sender, receiver = spawn(), spawn()
    agent = connect(sender, receiver)
    assert sender.write_and_wait(agent, [0], [0], b"first") is None
    os.kill(receiver.process.pid, signal.SIGSTOP)
    handles = [sender.write(agent, [0], [1], b"note %d" % i) for i in range(100)]
    os.kill(receiver.process.pid, signal.SIGCONT)

    for i, handle in enumerate(handles):
        assert wait_until(lambda h=handle: sender.write_done(h), "end of a write") == (None,)
        receiver.wait_for_note(b"note %d" % i)


# -- failing -----------------------------------------------------------------------------


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


def test_a_peer_may_be_removed_and_added_anew(spawn: Callable[..., Worker]) -> None:
    sender, receiver = spawn(), spawn()
    agent = connect(sender, receiver)
    assert sender.write_and_wait(agent, [0], [0], b"before") is None
    sender.remove_peer(agent)
    with pytest.raises(TransferError, match="not known"):
        sender.write(agent, [0], [1], b"between")

    assert connect(sender, receiver) == agent
    assert sender.write_and_wait(agent, [0], [2], b"after") is None
    receiver.wait_for_note(b"after")


def test_a_stopped_peer_costs_the_deadline_and_can_be_added_anew(
    spawn: Callable[..., Worker],
) -> None:
    sender = spawn(ServiceWorker, 64, 256 * 1024)
    receiver = spawn(TransportWorker, 64, 256 * 1024)
    agent = connect(sender, receiver)
    wait_until(lambda: sender.peer_state(agent) == "added", "peer")
    blocks = list(range(64))
    assert sender.write_and_wait(agent, blocks, blocks, b"alive") is None

    os.kill(receiver.process.pid, signal.SIGSTOP)
    handles = [sender.write(agent, blocks, blocks, b"stopped %d" % i) for i in range(40)]
    for handle in handles:
        wait_until(lambda h=handle: sender.write_done(h), "end of a write")
    assert any(sender.all_done()[handle] for handle in handles)
    assert "took longer" in sender.peer_state(agent)
    os.kill(receiver.process.pid, signal.SIGCONT)

    connect(sender, receiver)
    wait_until(lambda: sender.peer_state(agent) == "added", "peer")
    sender.fill(blocks, 10)
    assert sender.write_and_wait(agent, blocks, blocks, b"anew") is None
    receiver.wait_for_note(b"anew")
    assert receiver.read(blocks) == sender.read(blocks)


def test_the_service_moves_blocks_both_ways(spawn: Callable[..., Worker]) -> None:
    one, other = spawn(ServiceWorker), spawn(ServiceWorker)
    to_other, to_one = connect(one, other), connect(other, one)
    wait_until(lambda: one.peer_state(to_other) == "added", "peer")
    wait_until(lambda: other.peer_state(to_one) == "added", "peer")
    one.fill([0, 1], 11)
    assert one.write_and_wait(to_other, [0, 1], [4, 9], b"there") is None
    assert other.wait_for_note(b"there")[0] == to_one
    assert other.write_and_wait(to_one, [4, 9], [14, 15], b"back") is None
    one.wait_for_note(b"back")
    assert one.read([14, 15]) == one.read([0, 1])


# -- descriptors -------------------------------------------------------------------------


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
    sender.add_peer(agent, descriptor, num_blocks)
    assert sender.write_and_wait(agent, [0], [0], b"fine") is None


def test_descriptors_that_do_not_fit_are_refused(spawn: Callable[..., Worker]) -> None:
    sender = spawn()
    receiver = spawn(TransportWorker, 16, 8192)
    agent, descriptor, num_blocks = receiver.introduce()
    with pytest.raises(TransferError, match="4096"):
        sender.add_peer(agent, descriptor, num_blocks)
    fitting = spawn()
    agent, descriptor, num_blocks = fitting.introduce()
    with pytest.raises(TransferError, match="15 of 4096"):
        sender.add_peer(agent, descriptor, num_blocks - 1)
    with pytest.raises(TransferError):
        sender.add_peer("0123456789abcdef", descriptor, num_blocks)
    with pytest.raises(TransferError):
        sender.add_peer(agent, b"\x00 nothing of ours", num_blocks)
    with pytest.raises(TransferError, match="own peer"):
        sender.add_peer(*sender.introduce())
    sender.add_peer(agent, descriptor, num_blocks)
    assert sender.write_and_wait(agent, [0], [0], b"fine") is None


# -- closing -----------------------------------------------------------------------------


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
        own_agent = worker.introduce()[0]
        worker.add_peer(agent, descriptor, num_blocks)
        key = worker.write(agent, [0], [0], b"cycle")
        assert wait_until(partial(_step_until_done, worker, key), "end of a write") == (None,)
        worker.stop()
        del worker
        gc.collect()
        return {
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "tasks": sorted(_names_of_tasks()),
            "files": files_of(own_agent),
            "fds": sorted(_open_files()),
        }


def _step_until_done(worker: ServiceWorker, key: int) -> tuple[str | None] | None:
    worker.step()
    return worker.write_done(key)


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
        with open(f"/proc/self/task/{task}/comm") as file:
            names.append(file.read().strip())
    return names


def test_closing_leaves_nothing_behind(spawn: Callable[..., Worker]) -> None:
    receiver, checker = spawn(), spawn(LeakCheck)
    first = checker.cycle(*receiver.introduce())
    later = [checker.cycle(*receiver.introduce()) for _ in range(3)][-1]
    assert later == first
    assert first["threads"] == ["MainThread"]
    assert first["files"] == []
