"""A pool's memory goes to peers of our user that prove the key, and comes only from its owner."""

from __future__ import annotations

import os
import resource
import selectors
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from kv_transfer.transports import memory_server
from kv_transfer.transports.framed_stream import MAX_FRAME_BYTES, FramedStream
from kv_transfer.transports.interface import Notification
from kv_transfer.transports.memory_client import CONNECT_WAIT_S, MemoryClient
from kv_transfer.transports.memory_file import SharedMemory
from kv_transfer.transports.memory_handshake import NONCE_BYTES, PROOF_BYTES, Handshake
from kv_transfer.transports.memory_server import PROOF_WAIT_S, MemoryServer
from protocol.errors import TransferError
from tests.processes import open_files

NUM_BYTES = 4096


class Owner:
    """A server with memory, and a clock that stands still."""

    def __init__(self) -> None:
        self.now = 0.0
        self.selector = selectors.DefaultSelector()
        self.server = MemoryServer(self.selector, lambda: self.now)
        self.memory = SharedMemory(NUM_BYTES)
        self.server.serve(self.memory.file)

    def turn(self) -> list[Notification]:
        """What arrived, once all sockets have been read."""
        arrived = []
        while ready := self.selector.select(0):
            for key, _ in ready:
                key.data()
            arrived += self.server.take_notifications()
        return arrived + self.server.take_notifications()

    def client(self, key: bytes | None = None, num_bytes: int = NUM_BYTES) -> MemoryClient:
        return MemoryClient(
            "peer", self.server.address, key or self.server.key, num_bytes, lambda: self.now
        )

    def stranger(self) -> FramedStream:
        """A raw connection."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(self.server.address)
        return FramedStream(connection)

    def close(self) -> None:
        self.server.close()
        self.selector.close()
        self.memory.close()
        self.memory.view.close()


@pytest.fixture
def owner() -> Iterator[Owner]:
    files = open_files()
    owner = Owner()
    yield owner
    owner.close()
    assert open_files() <= files, "a file was left open"


def opened(owner: Owner, client: MemoryClient) -> MemoryClient:
    for _ in range(3):
        owner.turn()
        client.poll()
    assert client.is_open
    return client


def test_a_peer_with_the_key_gets_the_memory_and_is_listened_to(owner: Owner) -> None:
    offset = owner.memory.offset
    client = opened(owner, owner.client(num_bytes=offset + NUM_BYTES))
    assert client.memory is not None
    client.memory[offset + 5] = 7
    assert owner.memory.view[5] == 7
    client.queue(b"hello")
    assert client.flush() == 1
    assert owner.turn() == [Notification("peer", b"hello")]
    client.queue(b"last")
    client.flush()
    client.close()
    assert owner.turn() == [Notification("peer", b"last")]
    assert owner.server.num_refused == 0


def test_a_key_that_is_not_the_descriptors_is_refused(owner: Owner) -> None:
    client = owner.client(key=bytes(32))
    with pytest.raises(TransferError, match="out of reach"):
        opened(owner, client)
    assert client.memory is None
    assert owner.server.num_refused == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        bytes(NONCE_BYTES + PROOF_BYTES),
        bytes(range(NONCE_BYTES + PROOF_BYTES)) + b"peer",
        bytes(MAX_FRAME_BYTES),
    ],
)
def test_strangers_get_nothing_and_are_not_listened_to(owner: Owner, answer: bytes) -> None:
    stranger = owner.stranger()
    owner.turn()
    (challenge,) = stranger.receive()
    assert len(challenge) == NONCE_BYTES
    stranger.queue(answer)
    stranger.queue(b"listen to me")
    stranger.flush()
    assert owner.turn() == []
    frames, file = stranger.receive_file()
    assert (frames, file, stranger.is_ended) == ([], None, True)
    assert owner.server.num_refused == 1
    stranger.close()


def test_an_answer_to_another_challenge_is_refused(owner: Owner) -> None:
    """A proof that somebody saw is worth nothing on another connection."""
    one, other = owner.stranger(), owner.stranger()
    owner.turn()
    (challenge,) = one.receive()
    other.receive()
    seen = Handshake(owner.server.key, challenge, bytes(NONCE_BYTES), b"peer")
    other.queue(seen.nonce + seen.peer_proof + seen.agent)
    other.flush()
    owner.turn()
    assert other.receive_file() == ([], None)
    assert other.is_ended
    reflected = seen.nonce + seen.owner_proof + seen.agent
    one.queue(reflected)
    one.flush()
    owner.turn()
    assert one.receive_file() == ([], None)
    assert one.is_ended
    assert owner.server.num_refused == 2
    one.close()
    other.close()


def test_a_frame_that_is_too_long_is_refused_before_it_is_held(owner: Owner) -> None:
    stranger = owner.stranger()
    owner.turn()
    stranger.socket.sendall((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
    owner.turn()
    stranger.receive()
    assert stranger.is_ended
    assert owner.server.num_refused == 1
    stranger.close()


def test_silent_strangers_are_few_and_turned_away_in_time(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_server, "_MAX_UNPROVED", 3)
    strangers = [owner.stranger() for _ in range(5)]
    for key, _ in owner.selector.select(0):
        key.data()
    owner.server.take_notifications()
    challenged = [len(each.receive()) for each in strangers]
    assert challenged == [1, 1, 1, 0, 0]
    owner.now = PROOF_WAIT_S
    owner.server.take_notifications()
    for each in strangers[:3]:
        each.receive()
        assert each.is_ended
    opened(owner, owner.client()).close()
    for each in strangers:
        each.close()


def test_memory_that_is_smaller_than_its_descriptor_says(owner: Owner) -> None:
    client = owner.client(num_bytes=1 << 40)
    with pytest.raises(TransferError, match="expected 1099511627776"):
        opened(owner, client)
    assert client.memory is None


def test_an_owner_that_does_not_answer_is_given_up(owner: Owner) -> None:
    client = owner.client()
    client.poll()
    owner.now = CONNECT_WAIT_S
    with pytest.raises(TransferError, match="has not answered for 10 s"):
        client.poll()
    assert not client.is_open
    client.poll()


def test_a_full_queue_of_connections_is_waited_for(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_server, "_BACKLOG", 0)
    busy = Owner()
    waiting = []
    for _ in range(3):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stranger.setblocking(False)
        waiting.append(stranger)
        try:
            stranger.connect(busy.server.address)
        except BlockingIOError:
            break
    client = busy.client()
    client.poll()
    assert not client.is_open
    for stranger in waiting:
        stranger.close()
    assert opened(busy, client).memory is not None
    client.close()
    busy.close()


class FalseOwner:
    """Somebody who listens at the name of an owner that has died, and has memory to give."""

    def __init__(self, answer: Callable[[FramedStream, bytes, int], None]) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind("")  # the kernel chooses a name
        self.listener.listen()
        self.memory = SharedMemory(NUM_BYTES)
        self._answer = answer

    def deceive(self) -> MemoryClient:
        address = self.listener.getsockname()
        client = MemoryClient("peer", "\0" + address[1:].decode(), bytes(32), NUM_BYTES)
        connection, _ = self.listener.accept()
        stream = FramedStream(connection)
        stream.queue(bytes(NONCE_BYTES))
        stream.flush()
        client.poll()
        (frame,) = stream.receive()
        self._answer(stream, frame, self.memory.file)
        try:
            client.poll()
            return client
        finally:
            stream.close()
            self.listener.close()
            self.memory.close()
            self.memory.view.close()


@pytest.mark.parametrize(
    "answer",
    [
        lambda stream, frame, file: stream.send_file(bytes(PROOF_BYTES), file),
        lambda stream, frame, file: stream.send_file(
            frame[NONCE_BYTES : NONCE_BYTES + PROOF_BYTES], file
        ),
        lambda stream, frame, file: stream.send_file(b"", file),
        lambda stream, frame, file: socket.send_fds(stream.socket, [b"\xff" * 4], [file]),
        lambda stream, frame, file: socket.send_fds(stream.socket, [b"\xff"], [file, file, file]),
    ],
    ids=["zeroes", "the client's own proof", "nothing", "too long", "many files"],
)
def test_memory_of_an_owner_without_the_key_is_not_mapped(
    answer: Callable[[FramedStream, bytes, int], None],
) -> None:
    files = open_files()
    try:
        client = FalseOwner(answer).deceive()
    except TransferError:
        pass
    else:
        assert client.memory is None
        assert not client.is_open
        client.close()
    assert open_files() <= files, "the file that came was closed"


def test_peers_wait_while_there_are_no_descriptors(owner: Owner) -> None:
    client, limits = owner.client(), resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(owner.memory.file)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        for key, _ in owner.selector.select(0):
            key.data()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    opened(owner, client).close()
    owner.turn()


AS_NOBODY = """
import os, socket, sys
from kv_transfer.transports.memory_client import MemoryClient
from protocol.errors import TransferError
from tests.processes import open_files
address, key = "\\0" + sys.argv[1], bytes.fromhex(sys.argv[2])
os.setgid(65534)
os.setuid(65534)
try:
    MemoryClient("peer", address, key, 4096)
except TransferError as error:
    print(error)
raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
raw.connect(address)
print(raw.recv(100))
"""
"""A process of another user, which even has the key."""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_turned_away_by_both_sides(owner: Owner) -> None:
    arguments = [owner.server.address[1:], owner.server.key.hex()]
    command = [sys.executable, "-c", AS_NOBODY, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while owner.server.num_refused < 2 and process.poll() is None:
            owner.turn()
        printed, _ = process.communicate(timeout=60)
    belongs, received = printed.splitlines()
    assert f"its socket belongs to process {os.getpid()} of user 0" in belongs
    assert received == "b''", "not even a challenge"
    assert owner.server.num_refused == 2


AS_A_CROWD = """
import os, socket, sys
os.setgid(65534)
os.setuid(65534)
connections = []
for _ in range(100):
    connections.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    connections[-1].connect("\\0" + sys.argv[1])
print("connected", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_strangers_who_keep_connecting_do_not_keep_the_thread(owner: Owner) -> None:
    """One turn looks at a bounded number of connections, however many wait."""
    command = [sys.executable, "-c", AS_A_CROWD, owner.server.address[1:]]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as crowd:  # type: ignore[call-overload]
        assert crowd.stdout.readline() == "connected\n"
        (ready,) = owner.selector.select(0)
        ready[0].data()
        assert 0 < owner.server.num_refused < 100
        owner.turn()
        assert owner.server.num_refused == 100
        crowd.communicate(timeout=60)


AS_ANOTHER_USER = """
import os, sys
pid = int(sys.argv[1])
os.setgid(65534)
os.setuid(65534)
for path in (f"/proc/{pid}/fd", f"/proc/{pid}/mem", f"/proc/{pid}/environ", f"/proc/{pid}/maps"):
    try:
        found = os.listdir(path) if path.endswith("fd") else open(path, "rb").read(1)
        print(path, "opened", found)
    except OSError as error:
        print("refused", type(error).__name__)
shown = [name for name in os.listdir("/dev/shm") if "baton" in name]
print("in /dev/shm:", shown)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_finds_no_way_to_the_memory(owner: Owner) -> None:
    """Neither through the file descriptor of the memory, nor through a name."""
    assert owner.memory.file >= 0
    command = [sys.executable, "-c", AS_ANOTHER_USER, str(os.getpid())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    *attempts, shown = done.stdout.splitlines()
    assert attempts == ["refused PermissionError"] * 4
    assert shown == "in /dev/shm: []"
