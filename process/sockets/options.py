"""The options of every ZeroMQ socket of Baton: bounded queues, heartbeats, no lingering.

Endpoints are `tcp://host:port`. Heartbeats show that a peer's process is alive; Ping and Pong show
that its loop is turning.
"""

from __future__ import annotations

import errno

import zmq

from process.sockets.host_names import bracketed
from protocol import wire
from protocol.errors import ConfigError

QUEUE_FRAMES = 100_000
HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 5000
HANDSHAKE_MS = 3000
"""Milliseconds after which a peer that has not proved the secret is disconnected."""
RECONNECT_MS = 50
RECONNECT_MAX_MS = 1000
_NO_NAME = "this is neither an interface of this host nor a name that resolves to an address"
_REASONS = {errno.ENODEV: _NO_NAME, errno.EADDRNOTAVAIL: "this host has no such address"}


def tcp_endpoint(host: str, port: int) -> str:
    """`tcp://host:port` for bind; port 0 means any free port, an IPv6 address gets brackets."""
    return f"tcp://{bracketed(host)}:{port or '*'}"


def open_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, patience_s: float = 0.0
) -> zmq.Socket[bytes]:
    """A socket with Baton's options, neither bound nor connected. A peer that stands still loses
    its connection after 5 s and `patience_s`. The caller closes the socket."""
    timeout_ms = HEARTBEAT_TIMEOUT_MS + round(patience_s * 1e3)
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, QUEUE_FRAMES)
    socket.setsockopt(zmq.RCVHWM, QUEUE_FRAMES)
    socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, timeout_ms)
    socket.setsockopt(zmq.HEARTBEAT_TTL, timeout_ms)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    socket.setsockopt(zmq.IPV6, 1)
    return socket


def bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """Bind and return the endpoint with the chosen port. Raises ConfigError."""
    socket.setsockopt(zmq.IPV6, "[" in endpoint)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        number = error.errno or 0
        reason = _REASONS.get(number) or zmq.strerror(number)
        raise ConfigError(f"cannot listen on {endpoint}: {reason}") from error
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
