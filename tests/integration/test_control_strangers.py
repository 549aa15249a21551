"""What is foreign to a control server or a link is counted and does no harm."""

from __future__ import annotations

import contextlib
import socket as tcp
from urllib.parse import urlsplit

import pytest
import zmq

from process.sockets.control import ControlLink
from process.sockets.hello import NO_HELLO
from protocol import wire
from protocol.events import CacheEvents
from protocol.messages import CacheDump, CacheDumpRequest, Hello, HelloAccepted, Ping, Pong
from tests.integration.control_bench import (
    ANY_PORT,
    HELLO,
    WAIT_S,
    Bench,
    abort,
    connected,
    received,
    until,
)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b""], "undecodable"),
        ([b"garbage"], "undecodable"),
        ([b"\xc1" * 1000], "undecodable"),
        ([b"\x91" * 60_000], "undecodable"),
        ([wire.encode(abort(1))[:-3]], "undecodable"),
        ([wire.encode(CacheEvents(worker_id="w", incarnation="i", seq=1, stored=[], removed=[]))],
         "undecodable"),
        ([b"", wire.encode(HELLO)], "undecodable"),
        ([wire.encode(HELLO), wire.encode(HELLO)], "undecodable"),
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
        assert server.refused == {"undecodable": 1}
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
    assert link.dropped == {"undecodable": 2, "foreign": 1}


def test_a_stranger_s_large_frame_is_refused_by_its_header(bench: Bench) -> None:
    """Before it has proved anything nobody makes us set memory aside for what it announces."""
    server = bench.serve()
    host, port = server.endpoint.removeprefix("tcp://").rsplit(":", 1)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\x00") + bytes(32)
    with tcp.create_connection((host, int(port)), timeout=WAIT_S) as stranger:
        stranger.sendall(greeting)
        theirs = b""
        while len(theirs) < 64 and (got := stranger.recv(64)):
            theirs += got
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            stranger.sendall(b"\x06" + (60_000_000).to_bytes(8, "big"))  # a long command
            while stranger.recv(4096):
                pass  # ends when the server closes, which it does without waiting for the body
    assert server.socket.getsockopt(zmq.MAXMSGSIZE) == wire.MAX_FRAME_BYTES
    assert server.socket.getsockopt(zmq.HANDSHAKE_IVL) == 3000, "a silent stranger is not kept long"


def test_long_messages_of_members_still_arrive(bench: Bench) -> None:
    server = bench.serve()
    link = bench.link(server)
    until(lambda: server.receive() == [] and server.peers, server.socket)
    (peer,) = server.peers
    until(lambda: link.receive() == [] and link.accepted, link.socket)
    dump = CacheDump(incarnation="i", seq=1, hashes=[i.to_bytes(16, "big") for i in range(50_000)])
    assert server.send(peer, dump)
    assert until(link.receive, link.socket) == [dump]
    assert link.dropped == {}


def test_a_flood_comes_in_parts_and_loses_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no time at all, each turn takes one message; nobody counts as silent meanwhile."""
    server = bench.serve()
    flooding = bench.stranger(server.endpoint)
    flooding.send(wire.encode(HELLO))
    until(lambda: server.receive() == [] and server.peers, server.socket)
    monkeypatch.setattr("process.sockets.control.MAX_RECEIVE_S", 0.0)
    for number in range(5):
        flooding.send(wire.encode(abort(number)))
    parts = []
    while sum(map(len, parts)) < 5:
        assert server.socket.poll(WAIT_S * 1000)
        parts.append(server.receive())
        assert server.lost(bench.clock.now + 1000) == []
    assert [len(each) for each in parts] == [1] * 5
    assert [message for part in parts for _, message in part] == [abort(each) for each in range(5)]
