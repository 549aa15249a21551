"""Control and event sockets between peers of one cluster, whether they agree or not."""

from __future__ import annotations

import msgspec
import pytest
import zmq

from process.sockets.control import ControlLink
from process.sockets.events import EventPublisher
from process.sockets.options import tcp_endpoint
from protocol import wire
from protocol.errors import ConfigError, ProtocolError
from protocol.events import CacheEvents
from protocol.handoff_messages import CachedPrefix, KvClosed
from protocol.messages import (
    PROTOCOL_VERSION,
    Generate,
    Hello,
    HelloAccepted,
    HelloRefused,
    Ping,
    Prefill,
    Role,
)
from protocol.sampling import SamplingParams
from tests.integration.control_bench import (
    ANY_PORT,
    HELLO,
    Bench,
    abort,
    connected,
    received,
    until,
)


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


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_link_knows_the_address_of_a_server_that_has_answered(bench: Bench, host: str) -> None:
    """An IPv4 address as such, though the socket of a link is of IPv6."""
    server = bench.serve(tcp_endpoint(host, 0))
    link = bench.link(server)
    assert link.address == ""
    connected(server, link)
    assert link.address == host


def test_what_both_ends_have_read_does_not_end_their_connection(bench: Bench) -> None:
    """Otherwise an honest connection would end after some minutes."""
    server = bench.serve()
    link = bench.link(server)
    peer, large = connected(server, link), CachedPrefix(hashes=[bytes(16)] * 4000)
    num_bytes = len(wire.encode(large))
    for _ in range(20):
        assert link.send(large)
        received(server, 1)
        assert server.send(peer, large)
        until(link.receive, link.socket)
    for inflow in (server._inflow, link._inflow):
        assert sum(inflow.unread().values()) < 5 * num_bytes


def test_requests_are_counted_by_the_session_that_brought_them(bench: Bench) -> None:
    def leg(kind: type[Generate] | type[Prefill]) -> Generate | Prefill:
        return kind(
            request_id="r",
            attempt=1,
            token_ids=[1],
            num_output=0,
            sampling=SamplingParams(max_tokens=1, seed=0),
            deadline_ms=1000,
        )

    server = bench.serve()
    first = bench.link(server, msgspec.structs.replace(HELLO, session="a"))
    assert connected(server, first).session == "a"
    second = bench.link(server, msgspec.structs.replace(HELLO, session="b"))
    until(lambda: (server.receive(), second.receive(), second.accepted)[-1], server.socket)
    assert server.legs_received == {}
    for message in (leg(Generate), abort(1), leg(Prefill)):
        assert first.send(message)
    assert second.send(leg(Generate))
    received(server, 4)
    assert server.legs_received == {"a": 2, "b": 1}
    bench.clock.now += 100
    server.receive()
    assert len(server.lost(bench.clock.now)) == 2
    assert server.legs_received == {}


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


def test_workers_of_two_deployments_whose_fingerprints_are_equal_speak_to_each_other(
    bench: Bench,
) -> None:
    server = bench.serve()
    worker = Hello(
        sender="decode-2",
        role=Role.DECODE,
        protocol_version=PROTOCOL_VERSION,
        model_fingerprint="model-a",
        layout_fingerprint="layout-a",
        weight_version="another commit",
        revision="another deployment",
    )
    assert connected(server, bench.link(server, worker)).name == "decode-2"


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
        (
            {"model_fingerprint": "model-b", "weight_version": "1f3a", "revision": "6d4c"},
            ("model fingerprint", "model-a", "model-b (weights 1f3a, deployment 6d4c)"),
        ),
        (
            {
                "role": Role.DECODE,
                "model_fingerprint": "",
                "layout_fingerprint": "layout-a",
                "revision": "6d4c",
            },
            ("model fingerprint", "model-a", " (deployment 6d4c)"),
        ),
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


def test_held_messages_are_bounded(bench: Bench) -> None:
    server = bench.serve()
    link = bench.link(server, max_held=2)
    assert [link.send(abort(n)) for n in range(3)] == [True, True, False]
    assert link.dropped == {"unsent": 1}
    connected(server, link)
    assert [message for _, message in received(server, 2)] == [abort(0), abort(1)]


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
