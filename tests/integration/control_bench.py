"""A control server with a test's clock, and who connects to it: links, and sockets of strangers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from process.sockets.control import ControlLink, ControlServer, Peer
from process.sockets.encrypted_sockets import Network
from process.sockets.hello import HelloPolicy
from process.sockets.options import tcp_endpoint
from protocol.message_base import Message
from protocol.messages import PROTOCOL_VERSION, Abort, Hello, Role

ANY_PORT = tcp_endpoint("127.0.0.1", 0)
WAIT_S = 60.0
PAUSE = threading.Event()
SECRET = "the secret of a test's cluster"
POLICY = HelloPolicy("decode-1", "life-1", "model-a", "layout-a")
HELLO = Hello(
    sender="router-1",
    role=Role.ROUTER,
    protocol_version=PROTOCOL_VERSION,
    model_fingerprint="model-a",
    layout_fingerprint="",
)


@dataclass
class Clock:
    """A clock that only the test moves."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Bench:
    """A server under test and whatever connects to it."""

    network: Network = field(default_factory=lambda: Network(SECRET))
    clock: Clock = field(default_factory=Clock)
    opened: list = field(default_factory=list)

    def serve(self, endpoint: str = ANY_PORT, policy: HelloPolicy = POLICY) -> ControlServer:
        server = ControlServer(self.network, endpoint, policy, silence_s=5.0, clock=self.clock)
        self.opened.append(server)
        return server

    def link(self, server: ControlServer, hello: Hello = HELLO, **options) -> ControlLink:
        link = ControlLink(self.network, server.endpoint, hello, clock=self.clock, **options)
        self.opened.append(link)
        return link

    def stranger(self, endpoint: str, kind: int = zmq.DEALER) -> zmq.Socket:
        socket = self.network.connecting(kind)
        socket.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
        socket.connect(endpoint)
        self.opened.append(socket)
        return socket

    def close(self) -> None:
        """Close everything that was opened, then the network."""
        for each in self.opened:
            each.close()
        self.network.close()


def until(what: Callable[[], object], *sockets: zmq.Socket) -> object:
    """The first true result of `what`. Tries again whenever one of the sockets has a message, or
    after a moment if no socket is named: trying without a pause would use up the context's
    sockets."""
    poller = zmq.Poller()
    for each in sockets:
        poller.register(each, zmq.POLLIN)
    deadline = time.monotonic() + WAIT_S
    while True:
        result = what()
        if result:
            return result
        assert time.monotonic() < deadline, "waited in vain"
        if sockets:
            poller.poll(50)
        else:
            PAUSE.wait(0.005)


def received(server: ControlServer, count: int = 1) -> list[tuple[Peer, Message]]:
    """The next `count` messages of the server."""
    found: list = []

    def drain() -> bool:
        found.extend(server.receive())
        return len(found) >= count

    until(drain, server.socket)
    return found


def connected(server: ControlServer, link: ControlLink) -> Peer:
    """The server's peer for `link`, once both sides are connected."""

    def both() -> bool:
        assert server.receive() == []
        assert link.receive() == []
        return link.accepted is not None

    known = set(server.peers)
    until(both, server.socket, link.socket)
    (peer,) = set(server.peers) - known
    return peer


def abort(number: int) -> Abort:
    """An Abort that its number distinguishes from others."""
    return Abort(request_id="r", attempt=number)
