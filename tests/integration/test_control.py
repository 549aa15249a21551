"""Control and event sockets between real sockets: good peers, foreign ones, silent ones."""

from __future__ import annotations

import contextlib
import socket as tcp
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest
import zmq

from protocol import wire
from protocol.errors import ConfigError, ProtocolError
from protocol.events import CacheEvents
from protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    CacheDumpRequest,
    Hello,
    HelloAccepted,
    HelloRefused,
    KvClosed,
    Message,
    Ping,
    Pong,
    Role,
)
from runtime.control import NO_HELLO, ControlLink, ControlServer, HelloPolicy, Peer
from runtime.events import EventPublisher
from runtime.network import Network
from runtime.sockets import tcp_endpoint

ANY_PORT = tcp_endpoint("127.0.0.1", 0)
WAIT_S = 10.0
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
    """A server under test and whatever connects to it; closes them all."""

    network: Network
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


@pytest.fixture
def bench() -> Iterator[Bench]:
    network = Network(SECRET)
    made = Bench(network)
    yield made
    for each in made.opened:
        each.close()
    network.close()


def until(what: Callable[[], object], *sockets: zmq.Socket) -> object:
    """The first true result of `what`, tried again whenever one of the sockets has something; if
    none is named, after a moment: who only tried would use up the context's sockets."""
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
    """The peer that `link` is for `server`, once both agree."""

    def both() -> bool:
        assert server.receive() == []
        assert link.receive() == []
        return link.accepted is not None

    known = set(server.peers)
    until(both, server.socket, link.socket)
    (peer,) = set(server.peers) - known
    return peer


def abort(number: int) -> Abort:
    return Abort(request_id="r", attempt=number)


# -- good peers ---------------------------------------------------------------------------------


def test_hello_then_messages_in_both_directions(bench: Bench) -> None:
    server = bench.serve()
    link = bench.link(server)
    link.send(abort(1))
    peer = connected(server, link)
    assert (peer.name, peer.role) == ("router-1", Role.ROUTER)
    assert link.accepted == HelloAccepted(worker_id="decode-1", incarnation="life-1")
    link.send(abort(2))
    assert received(server, 2) == [(peer, abort(1)), (peer, abort(2))], "held back, then in order"
    assert server.send(peer, KvClosed(request_id="r", attempt=2))
    answer = until(link.receive, link.socket)
    assert answer == [KvClosed(request_id="r", attempt=2)]
    assert not server.refused


def test_pings_are_answered_on_both_sides(bench: Bench) -> None:
    server = bench.serve()
    link = bench.link(server, ping_interval_s=1.0)
    peer = connected(server, link)
    link.tick(bench.clock.now)
    bench.clock.now += 1.5
    link.tick(bench.clock.now)
    link.tick(bench.clock.now)
    until(
        lambda: link.receive() or link.silent_s(bench.clock.now) == 0 or server.receive(),
        link.socket,
        server.socket,
    )
    assert link.last_heard == bench.clock.now
    assert server.lost(bench.clock.now) == []
    server.send(peer, Ping(nonce=7))
    stranger_free = until(
        lambda: link.receive() == [] and server.receive() == [] and not server.refused,
        link.socket,
        server.socket,
    )
    assert stranger_free


def test_a_router_without_a_layout_is_taken_and_a_worker_with_the_same(bench: Bench) -> None:
    server = bench.serve()
    worker = bench.link(server, Hello(
        sender="decode-2",
        role=Role.DECODE,
        protocol_version=PROTOCOL_VERSION,
        model_fingerprint="model-a",
        layout_fingerprint="layout-a",
    ))  # fmt: skip
    assert connected(server, worker).role is Role.DECODE
    assert connected(server, bench.link(server)).role is Role.ROUTER


@pytest.mark.parametrize(
    ("hello", "refusal"),
    [
        (
            {"protocol_version": 99, "model_fingerprint": "model-b"},
            ("protocol version", str(PROTOCOL_VERSION), "99"),
        ),
        (
            {"model_fingerprint": "model-b", "layout_fingerprint": "layout-b"},
            ("model fingerprint", "model-a", "model-b"),
        ),
        ({"layout_fingerprint": "layout-b"}, ("KV layout fingerprint", "layout-a", "layout-b")),
    ],
)
def test_a_mismatch_is_refused_with_both_values(
    bench: Bench, hello: dict, refusal: tuple[str, str, str]
) -> None:
    server = bench.serve()
    fields = {name: getattr(HELLO, name) for name in HELLO.__struct_fields__}
    link = bench.link(server, Hello(**(fields | hello)))
    link.send(abort(1))

    def refused() -> HelloRefused | None:
        assert server.receive() == []
        link.receive()
        return link.refused

    answer = until(refused, server.socket, link.socket)
    assert answer == HelloRefused(what=refusal[0], ours=refusal[1], theirs=refusal[2])
    assert server.refused == {"incompatible": 1}
    assert server.peers == []
    assert not link.send(abort(2))
    bench.clock.now += 100
    link.tick(bench.clock.now)
    assert connected(server, bench.link(server)), "and the server goes on"


# -- foreign peers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b""], "undecodable"),
        ([b"garbage"], "undecodable"),
        ([b"\xc1" * 1000], "undecodable"),
        ([b"\x91" * 100_000], "undecodable"),
        ([wire.encode(abort(1))[:-3]], "undecodable"),
        ([wire.encode(CacheEvents(worker_id="w", incarnation="i", seq=1, stored=[], removed=[]))],
         "undecodable"),
        ([b"", wire.encode(HELLO)], "foreign"),
        ([wire.encode(HELLO), wire.encode(HELLO)], "foreign"),
        ([wire.encode(abort(1))], "no_hello"),
        ([wire.encode(Ping(nonce=1))], "no_hello"),
        ([wire.encode(HelloAccepted(worker_id="w", incarnation="i"))], "no_hello"),
    ],
)  # fmt: skip
def test_foreign_frames_are_counted_and_the_server_goes_on(
    bench: Bench, frames: list[bytes], reason: str
) -> None:
    server = bench.serve()
    bench.stranger(server.endpoint).send_multipart(frames)

    def counted() -> bool:
        assert server.receive() == []
        return bool(server.refused)

    until(counted, server.socket)
    assert server.refused == {reason: 1}
    assert server.peers == []
    assert connected(server, bench.link(server))


def test_an_accepted_peer_may_send_garbage_too(bench: Bench) -> None:
    server = bench.serve()
    peer_socket = bench.stranger(server.endpoint)
    peer_socket.send(wire.encode(HELLO))
    until(lambda: server.receive() == [] and server.peers, server.socket)
    peer_socket.send(b"garbage")
    peer_socket.send(wire.encode(HelloAccepted(worker_id="w", incarnation="i")))
    peer_socket.send(wire.encode(Pong(nonce=1)))
    peer_socket.send(wire.encode(abort(3)))
    ((peer, message),) = received(server)
    assert (peer.name, message) == ("router-1", abort(3))
    assert server.refused == {"undecodable": 1, "foreign": 1}


def test_a_stranger_is_told_to_say_hello(bench: Bench) -> None:
    server = bench.serve()
    stranger = bench.stranger(server.endpoint)
    stranger.send(wire.encode(abort(1)))
    until(lambda: server.receive() == [] and server.refused, server.socket)
    assert wire.decode_control(stranger.recv()) == NO_HELLO


@pytest.mark.parametrize("kind", [zmq.REQ, zmq.SUB, zmq.PUSH, zmq.PAIR])
def test_other_kinds_of_sockets_do_no_harm(bench: Bench, kind: int) -> None:
    server = bench.serve()
    stranger = bench.stranger(server.endpoint, kind)
    if kind == zmq.REQ:
        stranger.send(wire.encode(HELLO))
        until(lambda: server.receive() == [] and server.refused, server.socket)
        assert server.refused == {"foreign": 1}
    assert connected(server, bench.link(server))
    assert len(server.peers) == 1


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" + b"\0" * 200, b"\0" * 64])
def test_raw_bytes_on_the_port_do_no_harm(bench: Bench, garbage: bytes) -> None:
    server = bench.serve()
    where = urlsplit(server.endpoint)
    with tcp.create_connection((where.hostname, where.port)) as raw:
        raw.sendall(garbage)
        assert connected(server, bench.link(server))
    assert not server.refused


def test_a_hello_again_renames_and_an_incompatible_one_ends_it(bench: Bench) -> None:
    server = bench.serve()
    socket = bench.stranger(server.endpoint)
    fields = {name: getattr(HELLO, name) for name in HELLO.__struct_fields__}
    socket.send(wire.encode(HELLO))
    socket.send(wire.encode(Hello(**(fields | {"sender": "other"}))))
    until(
        lambda: server.receive() == [] and [each.name for each in server.peers] == ["other"],
        server.socket,
    )
    (former,) = server.peers
    socket.send(wire.encode(Hello(**(fields | {"model_fingerprint": "model-b"}))))
    until(lambda: server.receive() == [] and not server.peers, server.socket)
    assert server.lost(bench.clock.now) == [former]


# -- peers that go ------------------------------------------------------------------------------


def test_a_silent_peer_is_lost_once_and_may_come_back(bench: Bench) -> None:
    server = bench.serve()
    link = bench.link(server)
    peer = connected(server, link)
    bench.clock.now += 4.9
    assert server.lost(bench.clock.now) == []
    bench.clock.now += 0.2
    assert server.lost(bench.clock.now) == [peer]
    assert server.lost(bench.clock.now) == []
    link.send(abort(1))
    again = received_after_reset(server, link)
    assert again == [abort(2)], "what was sent to a server that forgot us is gone"
    assert link.resets == 1
    assert server.refused["no_hello"] >= 1


def received_after_reset(server: ControlServer, link: ControlLink) -> list[Message]:
    """What the server gets once the link has said Hello again and sent one more message."""
    found: list[Message] = []
    sent = False

    def step() -> bool:
        nonlocal sent
        found.extend(message for _, message in server.receive())
        link.receive()
        if link.resets and link.accepted is not None and not sent:
            sent = link.send(abort(2))
        return bool(found)

    until(step, server.socket, link.socket)
    return found


def test_what_came_during_a_long_step_counts_as_heard(bench: Bench) -> None:
    server = bench.serve()
    link = bench.link(server, ping_interval_s=1.0)
    connected(server, link)
    bench.clock.now += 60
    link.tick(bench.clock.now)
    assert server.socket.poll(WAIT_S * 1000), "the ping is there before anybody looked"
    assert server.receive() == []
    assert server.lost(bench.clock.now) == []


def test_sending_to_a_closed_peer_is_counted_and_reported(bench: Bench) -> None:
    server = bench.serve()
    link = bench.link(server)
    peer = connected(server, link)
    link.close()

    until(lambda: not server.send(peer, abort(1)))
    assert server.undeliverable == 1
    assert server.lost(bench.clock.now) == [peer]
    assert server.peers == []
    assert not server.send(peer, abort(2))
    assert server.lost(bench.clock.now) == [], "it is reported once"
    assert server.undeliverable == 2


def serve_again(bench: Bench, endpoint: str, policy: HelloPolicy = POLICY) -> ControlServer:
    """A server at the endpoint of one that was closed; its port is free a moment later."""
    found: list[ControlServer] = []

    def bound() -> bool:
        with contextlib.suppress(ConfigError):
            found.append(bench.serve(endpoint, policy))
        return bool(found)

    until(bound)
    return found[0]


def test_a_restarted_worker_is_noticed_by_its_incarnation(bench: Bench) -> None:
    server = bench.serve()
    endpoint = server.endpoint
    link = bench.link(server, ping_interval_s=0.1)
    connected(server, link)
    server.close()
    policy = HelloPolicy("decode-1", "life-2", "model-a", "layout-a")
    second = serve_again(bench, endpoint, policy)

    def met_again() -> bool:
        bench.clock.now += 0.2
        link.tick(bench.clock.now)
        second.receive()
        link.receive()
        return link.accepted is not None and link.accepted.incarnation == "life-2"

    until(met_again, second.socket, link.socket)
    assert link.resets == 1


def unused_endpoint() -> str:
    """One that nobody listens on. Not of the ephemeral range: a connection to oneself, which TCP
    allows there, would keep the port taken."""
    for port in range(20_000, 30_000):
        with tcp.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(tcp.SOL_SOCKET, tcp.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return f"tcp://127.0.0.1:{port}"
    raise AssertionError("no port is free")


def test_a_link_says_hello_until_somebody_answers(bench: Bench) -> None:
    endpoint = unused_endpoint()
    link = ControlLink(bench.network, endpoint, HELLO, ping_interval_s=0.1, clock=bench.clock)
    bench.opened.append(link)
    assert link.send(abort(1))
    server = bench.serve(endpoint)

    def accepted() -> bool:
        bench.clock.now += 0.05
        link.tick(bench.clock.now)
        server.receive()
        link.receive()
        return link.accepted is not None

    until(accepted, server.socket, link.socket)
    assert abort(1) in [message for _, message in received(server)]


def test_held_messages_are_bounded(bench: Bench) -> None:
    server = bench.serve()
    link = bench.link(server, max_held=2)
    assert [link.send(abort(n)) for n in range(3)] == [True, True, False]
    assert link.dropped == {"unsent": 1}
    connected(server, link)
    assert [message for _, message in received(server, 2)] == [abort(0), abort(1)]


def test_a_link_drops_what_it_cannot_take(bench: Bench) -> None:
    foreign, endpoint = bench.network.listening(zmq.ROUTER, ANY_PORT)
    bench.opened.append(foreign)
    link = ControlLink(bench.network, endpoint, HELLO, clock=bench.clock)
    bench.opened.append(link)
    assert foreign.poll(WAIT_S * 1000)
    identity, _ = foreign.recv_multipart()
    foreign.send_multipart([identity, b"garbage"])
    foreign.send_multipart([identity, b"", wire.encode(abort(1))])
    foreign.send_multipart([identity, wire.encode(HELLO)])
    foreign.send_multipart([identity, wire.encode(CacheDumpRequest())])
    assert until(link.receive, link.socket) == [CacheDumpRequest()]
    assert link.dropped == {"undecodable": 1, "foreign": 2}


def test_endpoints(bench: Bench) -> None:
    assert tcp_endpoint("10.0.0.1", 7) == "tcp://10.0.0.1:7"
    assert tcp_endpoint("::1", 0) == "tcp://[::1]:*"
    server = bench.serve()
    assert server.endpoint.startswith("tcp://127.0.0.1:")
    with pytest.raises(ConfigError, match="cannot listen on"):
        bench.serve(server.endpoint)
    with pytest.raises(ProtocolError, match="cannot connect to nonsense"):
        ControlLink(bench.network, "nonsense", HELLO)


def test_events_reach_subscribers(bench: Bench) -> None:
    publisher = EventPublisher(bench.network, ANY_PORT)
    bench.opened.append(publisher)
    subscriber = bench.stranger(publisher.endpoint, zmq.SUB)
    subscriber.subscribe(b"")
    event = CacheEvents(worker_id="w", incarnation="i", seq=1, stored=[b"h"], removed=[])

    def arrived() -> bool:
        publisher.publish(event)
        return bool(subscriber.poll(10))

    until(arrived)
    assert wire.decode_event(subscriber.recv()) == event
