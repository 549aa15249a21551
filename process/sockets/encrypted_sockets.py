"""Makes a process's ZeroMQ sockets: encrypted, and open only to holders of the cluster's secret.

Owns the context. Every connection uses CURVE with two key pairs that all processes of the cluster
derive from its secret: servers hold one, clients the other, and each end accepts only the expected
key. Knows no messages. Invariant: no server socket is ever open without the gatekeeper that
authenticates its clients.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils import z85

from process.sockets.authenticator import DOMAIN, Gatekeeper
from process.sockets.inflow import Inflow
from process.sockets.options import bind, open_socket
from protocol.errors import ConfigError

_KEY_BYTES = 32


@dataclass(frozen=True)
class KeyPair:
    """A Curve25519 key pair in Z85, 40 bytes each."""

    public: bytes = field(repr=False)
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class ClusterKeys:
    """The keys of both ends of a connection; the same in every process of a cluster."""

    server: KeyPair
    client: KeyPair

    @staticmethod
    def derive(cluster_secret: str) -> ClusterKeys:
        """Derive the keys from the secret alone. Raises ConfigError if this libzmq has no CURVE."""
        if not zmq.has("curve"):
            raise ConfigError("this libzmq was built without CURVE: install pyzmq's own wheel")
        secret = cluster_secret.encode()
        return ClusterKeys(_key_pair(secret, b"baton server"), _key_pair(secret, b"baton client"))


class Network:
    """Makes the sockets of one process; `close` closes every one that is still open."""

    def __init__(self, cluster_secret: str, context: zmq.Context[Any] | None = None) -> None:
        """`context` defaults to a new one. This object owns it in either case."""
        self._keys = ClusterKeys.derive(cluster_secret)
        self._context: zmq.Context[Any] = zmq.Context() if context is None else context
        self._gatekeeper: Gatekeeper | None = None

    def connecting(self, kind: int, inflow: Inflow | None = None, patience_s: float = 0.0) -> Any:
        """A connecting socket of the context's socket class. The caller closes it. `inflow` is
        checked in a thread; without one, the caller bounds what peers send. `patience_s` is that of
        `open_socket`, and has to be the same at both ends."""
        socket = open_socket(self._context, kind, patience_s)
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._keys.server.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.client.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.client.secret)
        if inflow is not None:
            self._watch(socket, inflow)
        return socket

    def listening(
        self, kind: int, endpoint: str, inflow: Inflow | None = None, patience_s: float = 0.0
    ) -> tuple[Any, str]:
        """A socket bound to `endpoint`, and the actual endpoint. The caller closes the socket.
        `inflow` and `patience_s` are as for `connecting`. Raises ConfigError.
        """
        socket = open_socket(self._context, kind, patience_s)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.server.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a gatekeeper no client is admitted
        self._watch(socket, inflow)
        return socket, bind(socket, endpoint)

    def _watch(self, socket: zmq.Socket[Any], inflow: Inflow | None) -> None:
        if self._gatekeeper is None:
            self._gatekeeper = Gatekeeper(self._context, self._keys.client.public)
        self._gatekeeper.watch(socket, Inflow() if inflow is None else inflow)

    @property
    def num_turned_away(self) -> int:
        """Number of connections to our sockets that did not prove the secret."""
        return 0 if self._gatekeeper is None else self._gatekeeper.num_turned_away

    def close(self, linger_ms: int = 0) -> None:
        """Close all sockets; queued messages have `linger_ms` to leave. May be called twice."""
        if self._gatekeeper is not None:
            self._gatekeeper.close()
            self._gatekeeper = None
        self._context.destroy(linger=linger_ms)


def _key_pair(secret: bytes, purpose: bytes) -> KeyPair:
    """The key pair whose secret key is BLAKE2b of `secret`, personalised by `purpose`."""
    key = z85.encode(hashlib.blake2b(secret, digest_size=_KEY_BYTES, person=purpose).digest())
    return KeyPair(zmq.curve_public(key), key)
