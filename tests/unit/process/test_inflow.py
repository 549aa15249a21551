"""What peers send and nobody reads is counted on real connections, and bounded."""

from __future__ import annotations

import re
import socket as tcp
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import zmq

from process.sockets import authenticator
from process.sockets.control import ControlServer
from process.sockets.encrypted_sockets import Network
from process.sockets.hello import HelloPolicy
from process.sockets.inflow import DESCRIPTOR, Inflow, shut_accepted, wire_bytes

ANY_PORT = "tcp://127.0.0.1:*"
WAIT_MS = 20_000
BLOCK = b"x" * 60_000
ENDLESS = 4000
"""Frames of a message that takes seconds to send."""
LIMIT = 1 << 20
PAUSE = threading.Event()


@pytest.fixture
def networks(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Network, Network]]:
    """Two processes of one cluster; the first one checks often."""
    monkeypatch.setattr(authenticator, "CHECK_S", 0.01)
    ours, theirs = Network("the secret"), Network("the secret")
    yield ours, theirs
    theirs.close()
    ours.close()


@contextmanager
def connected(
    networks: tuple[Network, Network], inflow: Inflow
) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """A listening socket of the first process, and a connecting one of the second."""
    ours, theirs = networks
    socket, endpoint = ours.listening(zmq.ROUTER, ANY_PORT, inflow)
    peer = theirs.connecting(zmq.DEALER)
    peer.connect(endpoint)
    yield socket, peer
    peer.close()
    socket.close()


def send_without_end(socket: zmq.Socket[bytes], *to: bytes) -> None:
    """A message of which libzmq's peer sees no last frame for seconds."""
    for each in to:
        socket.send(each, zmq.SNDMORE)
    for _ in range(ENDLESS):
        socket.send(BLOCK, zmq.SNDMORE, copy=False)
    socket.send(b"the end")


def wait_until(is_true: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_MS / 1000
    while not is_true():
        assert time.monotonic() < deadline
        PAUSE.wait(0.005)


def wait_ended(inflow: Inflow) -> None:
    wait_until(lambda: inflow.num_ended)


@pytest.mark.parametrize(("listening", "sending"), [(zmq.ROUTER, zmq.DEALER), (zmq.PUB, zmq.XSUB)])
def test_a_message_without_an_end_ends_its_connection(
    networks: tuple[Network, Network], listening: int, sending: int
) -> None:
    ours, theirs = networks
    inflow = Inflow(LIMIT)
    socket, endpoint = ours.listening(listening, ANY_PORT, inflow)
    rogue = theirs.connecting(sending)
    rogue.connect(endpoint)
    send_without_end(rogue)
    wait_ended(inflow)
    assert not socket.poll(0)
    rogue.close()
    socket.close()


@pytest.mark.parametrize(("connecting", "sending"), [(zmq.DEALER, zmq.ROUTER), (zmq.SUB, zmq.XPUB)])
def test_a_server_s_message_without_an_end_ends_the_connection(
    networks: tuple[Network, Network], connecting: int, sending: int
) -> None:
    ours, theirs = networks
    inflow = Inflow(LIMIT)
    rogue, endpoint = theirs.listening(sending, ANY_PORT)
    socket = ours.connecting(connecting, inflow)
    socket.connect(endpoint)
    if connecting == zmq.SUB:
        socket.subscribe(b"")
        assert rogue.poll(WAIT_MS)
        send_without_end(rogue)
    else:
        socket.send(b"hello")
        send_without_end(rogue, rogue.recv_multipart()[0])
    wait_ended(inflow)
    assert not socket.poll(0)
    socket.close()
    rogue.close()


def test_the_connection_that_sends_too_much_ends_and_no_other(
    networks: tuple[Network, Network],
) -> None:
    ours, theirs = networks
    server = ControlServer(ours, ANY_PORT, HelloPolicy("w", "1", "", ""), silence_s=60.0)
    server._inflow._max_bytes = LIMIT
    honest, rogue = (theirs.connecting(zmq.DEALER) for _ in range(2))
    for each in (honest, rogue):
        each.connect(server.endpoint)
    honest.send(b"no message of ours, but a whole one")
    send_without_end(rogue)
    wait_ended(server._inflow)
    before = server.refused["undecodable"]
    honest.send(b"another")
    while server.refused["undecodable"] < 2:
        assert server.socket.poll(WAIT_MS)
        server.receive()
    assert before <= 1
    assert server.num_ended == 1
    for each in (honest, rogue):
        each.close()
    server.close()


@pytest.mark.parametrize("num_frames", [1, 3])
def test_what_was_read_is_counted_to_the_byte(
    networks: tuple[Network, Network], num_frames: int
) -> None:
    """Otherwise an honest connection would end after some gigabytes."""
    inflow = Inflow(LIMIT)
    with connected(networks, inflow) as (socket, peer):
        for size in (0, 1, 221, 222, 223, 224, 60_000):
            for _ in range(20):
                peer.send_multipart([bytes(size)] * num_frames)
                assert socket.poll(WAIT_MS)
                first, *frames = socket.recv_multipart(copy=False)
                taken = sum(wire_bytes(len(each)) for each in frames)
                inflow.took(int(first.get(DESCRIPTOR)), taken)
        assert list(inflow.unread().values()) == [0], "the handshake has less than is allowed for"
        peer.send(bytes(50_000))
        assert socket.poll(WAIT_MS)
        [unread] = inflow.unread().values()
        assert 49_000 < unread < 51_000


def test_heartbeats_are_no_messages_that_wait(networks: tuple[Network, Network]) -> None:
    """As many as come in a day, by a clock of the test's own."""
    now = 0.0
    inflow = Inflow(LIMIT, lambda: now)
    with connected(networks, inflow) as (socket, peer):
        peer.send(BLOCK)
        assert socket.poll(WAIT_MS)
        assert sum(inflow.unread().values()) > 50_000
        now = len(BLOCK) / 100
        assert sum(inflow.unread().values()) == 0


def test_a_descriptor_that_belongs_to_another_one_by_now_is_forgotten(
    networks: tuple[Network, Network],
) -> None:
    inflow = Inflow(LIMIT)
    with connected(networks, inflow) as (socket, peer):
        peer.send(b"x")
        assert socket.poll(WAIT_MS)
        [descriptor] = inflow.unread()
        known = inflow._connections[descriptor]
        known.name = ("192.0.2.1", 1)
        assert inflow.unread() == {}
        inflow.took(descriptor, 1)
        assert list(inflow.unread()) == [descriptor], "the connection that is there now"


def test_a_reader_of_one_connection_says_how_much_it_has_taken_so_far(
    networks: tuple[Network, Network],
) -> None:
    ours, theirs = networks
    inflow = Inflow(LIMIT)
    server, endpoint = theirs.listening(zmq.ROUTER, ANY_PORT)
    socket = ours.connecting(zmq.DEALER, inflow)
    socket.connect(endpoint)
    socket.send(b"hello")
    name, num_taken = server.recv_multipart()[0], 0
    while not inflow.num_open:
        PAUSE.wait(0.005)
    for _ in range(3):
        server.send_multipart([name, BLOCK])
        assert socket.poll(WAIT_MS)
        socket.recv()
        num_taken += wire_bytes(len(BLOCK))
        inflow.took_in_all(num_taken)
    assert list(inflow.unread().values()) == [0]
    server.send_multipart([name, BLOCK])
    assert socket.poll(WAIT_MS)
    inflow.took_in_all(num_taken)
    [unread] = inflow.unread().values()
    assert len(BLOCK) - 1000 < unread < len(BLOCK) + 1000
    socket.close()
    server.close()


FREE = 1024
"""Bytes of a connection that count as its handshake."""
Connect = Callable[[], tuple[tcp.socket, int]]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes a connection: the end that sends, and the descriptor of the other one."""
    opened: list[tcp.socket] = []

    def make() -> tuple[tcp.socket, int]:
        with tcp.create_server(("127.0.0.1", 0)) as listener:
            sender = tcp.create_connection(listener.getsockname(), timeout=WAIT_MS / 1000)
            receiver, _ = listener.accept()
        opened.extend((sender, receiver))
        return sender, receiver.fileno()

    yield make
    for each in opened:
        each.close()


def send(sender: tcp.socket, num_bytes: int, inflow: Inflow, descriptor: int) -> None:
    """Returns when the bytes have come."""
    before = inflow.unread()[descriptor]
    sender.sendall(bytes(num_bytes))
    deadline = time.monotonic() + WAIT_MS / 1000
    while inflow.unread()[descriptor] < before + num_bytes - FREE:
        assert time.monotonic() < deadline, "the bytes do not come"
        PAUSE.wait(0.001)


def test_events_open_and_close_connections(connect: Connect) -> None:
    inflow = Inflow(LIMIT, lambda: 0.0)
    sender, descriptor = connect()
    assert (inflow.num_open, inflow.unread()) == (0, {})
    inflow.note(zmq.EVENT_ACCEPTED, descriptor)
    send(sender, 3000, inflow, descriptor)
    inflow.took(descriptor, 500)
    assert inflow.unread() == {descriptor: 3000 - 500 - FREE}
    inflow.note(zmq.EVENT_ACCEPTED, descriptor)
    assert inflow.unread() == {descriptor: 3000 - 500 - FREE}, "an event may come late"
    assert inflow.num_open == 1
    inflow.note(zmq.EVENT_DISCONNECTED, descriptor)
    assert (inflow.num_open, inflow.unread()) == (0, {})


def test_without_a_limit_no_connection_is_ended(connect: Connect) -> None:
    inflow = Inflow(None, lambda: 0.0)
    sender, descriptor = connect()
    inflow.note(zmq.EVENT_ACCEPTED, descriptor)
    send(sender, 100_000, inflow, descriptor)
    assert not inflow.check()
    assert (inflow.num_open, inflow.num_ended) == (0, 0)
    assert list(inflow.unread()) == [descriptor]


def test_connections_end_by_what_they_have_sent_until_the_rest_is_within_the_limit(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    inflow = Inflow(8000, lambda: 0.0)
    sizes = [5000, 9000, 2000, 7000, 1000]
    connections = [connect() for _ in sizes]
    for size, (sender, descriptor) in zip(sizes, connections, strict=True):
        inflow.note(zmq.EVENT_ACCEPTED, descriptor)
        send(sender, size + FREE, inflow, descriptor)
    assert sum(inflow.unread().values()) == sum(sizes)
    assert inflow.check()
    assert list(inflow.unread().values()) == [5000, 2000, 1000]
    assert (inflow.num_open, inflow.num_ended) == (3, 2)
    for size, (sender, _) in zip(sizes, connections, strict=True):
        sender.setblocking(False)
        if size in (9000, 7000):
            assert sender.recv(1) == b""
        else:
            with pytest.raises(BlockingIOError):
                sender.recv(1)
    assert not inflow.check(), "just as much as the limit is allowed"
    assert inflow.num_ended == 2
    said = re.findall(r"which sent (\d+) bytes .* \((\d+) so far\)", caplog.text)
    assert said == [("9000", "1"), ("7000", "2")]


def test_a_flood_of_ended_connections_fills_no_log(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    inflow = Inflow(0, lambda: 0.0)
    for _ in range(5):
        sender, descriptor = connect()
        inflow.note(zmq.EVENT_ACCEPTED, descriptor)
        send(sender, 1 + FREE, inflow, descriptor)
        inflow.check()
    assert inflow.num_ended == 5
    assert re.findall(r"\((\d+) so far\)", caplog.text) == ["1", "2", "4"]


def test_a_connection_that_is_another_one_by_now_is_not_ended(connect: Connect) -> None:
    inflow = Inflow(0, lambda: 0.0)
    sender, descriptor = connect()
    inflow.note(zmq.EVENT_ACCEPTED, descriptor)
    send(sender, 1 + FREE, inflow, descriptor)
    inflow._connections[descriptor].name = ("192.0.2.1", 1)
    inflow._end(descriptor, 1)
    assert inflow.num_ended == 0
    sender.setblocking(False)
    with pytest.raises(BlockingIOError):
        sender.recv(1)


def test_what_was_taken_in_all_counts_for_the_connection_that_came_last(connect: Connect) -> None:
    inflow = Inflow(LIMIT, lambda: 0.0)
    inflow.took_in_all(700)  # of a connection that is closed
    descriptors = []
    for _ in range(2):
        sender, descriptor = connect()
        inflow.note(zmq.EVENT_CONNECTED, descriptor)
        send(sender, 5000, inflow, descriptor)
        descriptors.append(descriptor)
    inflow.took_in_all(1000)
    inflow.took_in_all(1200)
    first, last = descriptors
    assert inflow.unread() == {first: 5000 - FREE, last: 5000 - FREE - 500}


def test_a_connection_with_one_of_the_last_descriptors_ends_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("process.sockets.options.HANDSHAKE_MS", 0)  # strangers may stay
    network, inflow = Network("the secret"), Inflow(LIMIT)
    socket, endpoint = network.listening(zmq.ROUTER, ANY_PORT, inflow)
    address = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
    with tcp.create_connection(address, WAIT_MS / 1000) as first:
        wait_until(lambda: inflow.num_open == 1)
        monkeypatch.setattr(authenticator, "is_reserved", lambda descriptor: True)
        with tcp.create_connection(address, WAIT_MS / 1000) as last, suppress(ConnectionError):
            read_to_end(last)
        first.setblocking(False)
        with pytest.raises(BlockingIOError):
            read_to_end(first)
    socket.close()
    network.close()


def read_to_end(connection: tcp.socket) -> None:
    while connection.recv(1000):
        pass


def test_only_a_connection_of_the_listener_is_shut() -> None:
    with tcp.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with tcp.create_connection(("127.0.0.1", port)) as client, listener.accept()[0] as ours:
            shut_accepted(ours.fileno(), f"tcp://127.0.0.1:{port + 1}")
            ours.send(b"a")
            shut_accepted(ours.fileno(), f"tcp://127.0.0.1:{port}")
            assert client.recv(2) == b"a"
            assert client.recv(2) == b""
            number = ours.fileno()
        shut_accepted(number, f"tcp://127.0.0.1:{port}")  # closed by now
        with open(__file__) as file:
            shut_accepted(file.fileno(), f"tcp://127.0.0.1:{port}")
            assert file.read(1)
