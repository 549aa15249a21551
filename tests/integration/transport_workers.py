"""Workers that are processes of their own (forked), driven over a pipe.

Each polls its transport every millisecond, keeps what it reports, and checks a notification's data
on arrival.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from kv_transfer.service import TransferService
from kv_transfer.transfer_loop import (
    NotificationArrived,
    PeerAdded,
    PeerFailed,
    WriteCommand,
    WriteFinished,
)
from kv_transfer.transports.interface import (
    Notification,
    PeerLost,
    PeerReady,
    PoolMemory,
    Transport,
    WriteDone,
)
from kv_transfer.transports.memory_file import SharedMemory
from kv_transfer.transports.registry import create_transport
from protocol.errors import TransferError
from tests.forked import fork_context

DEADLINE_S = 60.0
WRITE_TIMEOUT_S = 30.0
EMPTY = 0xEE
POLL_S, LONGEST_PAUSE_S = 0.001, 0.02
PAUSE = threading.Event()


def wait_until(ready: Callable[[], Any], what: str) -> Any:
    """Ask until the answer is true. Each question is a round trip to another process."""
    deadline, pause_s = time.monotonic() + DEADLINE_S, POLL_S
    while time.monotonic() < deadline:
        if answer := ready():
            return answer
        PAUSE.wait(pause_s)
        pause_s = min(1.2 * pause_s, LONGEST_PAUSE_S)
    pytest.fail(f"no {what} within {DEADLINE_S:g} s")


class Pool:
    """Blocks of bytes, in memory of the transport if it asks for that."""

    def __init__(
        self, allocate: Callable[[int], SharedMemory | None], num_blocks: int, block_bytes: int
    ) -> None:
        memory = allocate(num_blocks * block_bytes)
        flat = np.zeros(num_blocks * block_bytes, np.uint8) if memory is None else memory.view
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
        self.peers: dict[str, str] = {}
        self.done: dict[int, str | None] = {}
        self.notes: list[
            tuple[str, bytes, list[int]]
        ] = []  # with the blocks that were complete then

    def step(self) -> None:
        for event in self.transport.poll():
            match event:
                case WriteDone(handle, error):
                    self.done[handle] = error
                case Notification(agent, payload):
                    self.notes.append((agent, payload, self.pool.complete()))
                case PeerReady(agent):
                    self.peers[agent] = "added"
                case PeerLost(agent, reason):
                    self.peers[agent] = reason

    def introduce(self) -> tuple[str, bytes, int]:
        return self.transport.agent, self.transport.descriptor(), self.pool.place.num_blocks

    def add_peer(self, agent: str, descriptor: bytes, num_blocks: int) -> None:
        self.peers.pop(agent, None)
        self.transport.add_peer(agent, descriptor, num_blocks)

    def peer_state(self, agent: str) -> str | None:
        return self.peers.get(agent)

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

    def clear(self) -> None:
        self.pool.blocks[:] = EMPTY

    def stop(self) -> None:
        self.transport.close()


class ServiceWorker(TransportWorker):
    """The same commands, through the service's thread."""

    write_timeout_s = WRITE_TIMEOUT_S

    def __init__(self, name: str, num_blocks: int, block_bytes: int) -> None:
        self.woken = threading.Event()
        self.service = TransferService(
            lambda: create_transport(name, "cpu"), self.woken.set, self.write_timeout_s
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
        if not conn.poll(POLL_S):
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
        context = fork_context()
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
        """Stop the process in order if it lives, and wait for its end."""
        if self.process.is_alive():
            self.stop()
            self.process.join(DEADLINE_S)
            assert self.process.exitcode == 0
        self._conn.close()
        self.process.close()


def connect(sender: Worker, receiver: Worker) -> str:
    """Introduce both workers, so that the sender can write to the receiver. Returns the receiver's
    agent."""
    agent, descriptor, num_blocks = receiver.introduce()
    sender.add_peer(agent, descriptor, num_blocks)
    state = wait_until(lambda: sender.peer_state(agent), "connection")
    assert state == "added"
    return agent
