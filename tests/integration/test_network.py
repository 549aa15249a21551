"""Sockets of a cluster: members meet, strangers of every kind are turned away and counted."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

import pytest
import zmq

from process.sockets.authenticator import DOMAIN
from process.sockets.encrypted_sockets import ClusterKeys, Network
from protocol.errors import ConfigError
from tests.integration.fleets import wait_for

SECRET = "the secret of a test's cluster"
ANY_PORT = "tcp://127.0.0.1:*"
WAIT_MS = 60_000


class KeepingNetwork(Network):
    """Keeps its sockets alive, so that a test may leave them to `close`."""

    def __init__(self, secret: str) -> None:
        super().__init__(secret)
        self.kept: list[zmq.Socket[bytes]] = []

    def connecting(self, kind: int) -> zmq.Socket[bytes]:
        self.kept.append(super().connecting(kind))
        return self.kept[-1]

    def listening(self, kind: int, endpoint: str) -> tuple[zmq.Socket[bytes], str]:
        socket, bound = super().listening(kind, endpoint)
        self.kept.append(socket)
        return socket, bound


@pytest.fixture
def networks() -> Iterator[Callable[[str], Network]]:
    """Makes networks with a secret; closes them."""
    with contextlib.ExitStack() as stack:

        def make(secret: str = SECRET) -> Network:
            network = KeepingNetwork(secret)
            stack.callback(network.close)
            return network

        yield make


def wait_turned_away(network: Network, count: int) -> None:
    wait_for(f"{count} to be turned away", lambda: network.num_turned_away >= count)


def test_members_talk_over_both_planes(networks) -> None:
    server, client = networks(), networks()
    router, control = server.listening(zmq.ROUTER, ANY_PORT)
    publisher, events = server.listening(zmq.XPUB, ANY_PORT)
    dealer, subscriber = client.connecting(zmq.DEALER), client.connecting(zmq.SUB)
    dealer.connect(control)
    subscriber.connect(events)
    subscriber.subscribe(b"")
    dealer.send(b"hello")
    assert router.poll(WAIT_MS)
    assert router.recv_multipart()[1] == b"hello"
    assert publisher.poll(WAIT_MS)
    publisher.recv()
    publisher.send(b"event")
    assert subscriber.poll(WAIT_MS)
    assert subscriber.recv() == b"event"
    assert server.num_turned_away == client.num_turned_away == 0


def plain(socket: zmq.Socket[bytes]) -> None:
    """No CURVE at all."""


def other_client_key(socket: zmq.Socket[bytes]) -> None:
    """Knows the servers' public key, but not the secret: only the gatekeeper is in its way."""
    public, secret = zmq.curve_keypair()
    socket.curve_serverkey = ClusterKeys.derive(SECRET).server.public
    socket.curve_publickey, socket.curve_secretkey = public, secret


def stolen_public_key(socket: zmq.Socket[bytes]) -> None:
    """Claims the clients' public key without its secret half."""
    keys = ClusterKeys.derive(SECRET)
    socket.curve_serverkey, socket.curve_publickey = keys.server.public, keys.client.public
    socket.curve_secretkey = zmq.curve_keypair()[1]


def other_secret(socket: zmq.Socket[bytes]) -> None:
    """A whole other cluster."""
    keys = ClusterKeys.derive("the secret of another cluster")
    socket.curve_serverkey, socket.curve_publickey = keys.server.public, keys.client.public
    socket.curve_secretkey = keys.client.secret


@pytest.mark.parametrize("disguise", [plain, other_client_key, stolen_public_key, other_secret])
def test_strangers_are_turned_away_and_counted(networks, disguise, caplog) -> None:
    server = networks()
    router, endpoint = server.listening(zmq.ROUTER, ANY_PORT)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        disguise(stranger)
        stranger.connect(endpoint)
        stranger.send(b"let me in")
        with caplog.at_level(logging.WARNING):
            wait_turned_away(server, 1)
            wait_for("the line", lambda: "did not prove the cluster's secret" in caplog.text)
        member = networks().connecting(zmq.DEALER)
        member.connect(endpoint)
        member.send(b"hello")
        assert router.poll(WAIT_MS)
        assert router.recv_multipart()[1] == b"hello"
        assert not router.poll(0)


def test_a_server_of_another_cluster_learns_nothing(networks) -> None:
    impostor = networks("the secret of another cluster")
    router, endpoint = impostor.listening(zmq.ROUTER, ANY_PORT)
    member = networks().connecting(zmq.DEALER)
    member.connect(endpoint)
    member.send(b"a prompt")
    wait_turned_away(impostor, 2)
    assert not router.poll(0)


def test_without_a_gatekeeper_nobody_comes_in() -> None:
    """The server's socket as `listening` makes it, in a context where no one judges."""
    keys = ClusterKeys.derive(SECRET)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.curve_server = True
        router.curve_secretkey = keys.server.secret
        router.zap_domain = DOMAIN
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        monitor = router.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        member = KeepingNetwork(SECRET)
        socket = member.connecting(zmq.DEALER)
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send(b"hello")
        assert monitor.poll(WAIT_MS)
        assert not router.poll(0)
        member.close()
        router.disable_monitor()
        monitor.close(linger=0)


def test_many_strangers_while_nobody_looks_do_not_stop_the_server(networks) -> None:
    """More failures than a monitor's queue holds; then sockets close in any order."""
    server = networks()
    router, endpoint = server.listening(zmq.ROUTER, ANY_PORT)
    other, _ = server.listening(zmq.PUB, ANY_PORT)
    with zmq.Context() as context:
        for _ in range(30):
            before = server.num_turned_away
            strangers = [context.socket(zmq.DEALER) for _ in range(20)]
            for stranger in strangers:
                stranger.setsockopt(zmq.LINGER, 0)
                stranger.setsockopt(zmq.RECONNECT_IVL, 1)
                stranger.connect(endpoint)
            wait_turned_away(server, before + 20)
            for stranger in strangers:
                stranger.close()
    other.close()
    server.close()
    server.close()
    assert router.closed


def test_a_network_may_end_before_its_gatekeeper_has_run() -> None:
    for _ in range(100):
        network = Network(SECRET)
        router, _ = network.listening(zmq.ROUTER, ANY_PORT)
        network.close()
        assert router.closed


def test_keys_depend_on_the_secret_and_on_the_side_alone() -> None:
    keys, same = ClusterKeys.derive(SECRET), ClusterKeys.derive(SECRET)
    other = ClusterKeys.derive(SECRET + "!")
    assert keys == same
    secrets = {keys.server.secret, keys.client.secret, other.server.secret, other.client.secret}
    assert len(secrets) == 4
    assert keys.server.secret.decode() not in repr(keys)


def test_an_endpoint_that_is_taken_is_a_configuration_error(networks) -> None:
    network = networks()
    _, endpoint = network.listening(zmq.ROUTER, ANY_PORT)
    with pytest.raises(ConfigError, match="cannot listen on"):
        network.listening(zmq.ROUTER, endpoint)
