"""The event plane's socket for a worker: a PUB that routers subscribe to.

Events carry their own sequence numbers. A subscriber that misses events asks for a dump over the
control plane, so this socket resends no events.
"""

from __future__ import annotations

import zmq

from process.sockets.encrypted_sockets import Network
from process.sockets.inflow import Inflow
from protocol import wire
from protocol.events import EventMessage

MAX_UNREAD_BYTES = 1024 * 1024
"""Subscribers send nothing but their subscriptions."""


class EventPublisher:
    """Publishes load and cache events to all subscribers. Owns the socket.

    Subscribers connect to `endpoint`, which contains the chosen port.
    """

    def __init__(self, network: Network, endpoint: str) -> None:
        """Binds to `endpoint` (`tcp://host:*` for any free port). Raises ConfigError."""
        self._socket: zmq.Socket[bytes]
        inflow = Inflow(MAX_UNREAD_BYTES)
        self._socket, self.endpoint = network.listening(zmq.PUB, endpoint, inflow)

    def publish(self, message: EventMessage) -> None:
        """Send to every subscriber. A subscriber that is too slow misses the event and detects the
        gap."""
        self._socket.send_multipart(wire.parts(wire.encode(message)), zmq.NOBLOCK)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(linger=0)
