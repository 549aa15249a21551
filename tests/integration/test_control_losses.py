"""Peers that fall silent, go, restart or are not there yet: each side notices, and meets again."""

from __future__ import annotations

import contextlib
import socket as tcp

from process.sockets.control import ControlLink, ControlServer
from process.sockets.hello import HelloPolicy
from protocol.errors import ConfigError
from protocol.message_base import Message
from tests.integration.control_bench import (
    HELLO,
    POLICY,
    WAIT_S,
    Bench,
    abort,
    connected,
    received,
    until,
)


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


def test_a_server_of_a_new_incarnation_is_met_anew(bench: Bench) -> None:
    server = bench.serve()
    link = bench.link(server, ping_interval_s=0.1)
    peer = connected(server, link)
    server.reincarnate("life-2")
    assert (server.peers, server.legs_received) == ([], {})
    assert server.lost(bench.clock.now) == [peer]
    assert server.lost(bench.clock.now + 1000) == [], "it is reported once"
    assert link.send(abort(1))
    assert received_after_reset(server, link) == [abort(2)]
    assert link.accepted is not None
    assert link.accepted.incarnation == "life-2"


def test_a_peer_whose_messages_are_of_no_use_is_dropped_once(bench: Bench) -> None:
    server = bench.serve()
    link = bench.link(server)
    peer = connected(server, link)
    server.drop(peer)
    server.drop(peer)
    assert server.refused == {"unusable": 1}
    assert server.lost(bench.clock.now) == [peer]
    assert server.lost(bench.clock.now + 1000) == []
    assert link.send(abort(1))
    assert received_after_reset(server, link) == [abort(2)]
