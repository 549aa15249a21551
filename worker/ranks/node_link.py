"""A node's connection to the head of its worker. Belongs to the node's thread."""

from __future__ import annotations

import time
from collections.abc import Mapping

import zmq
from zmq.utils.monitor import parse_monitor_message

from process.sockets.authenticator import HANDSHAKE_FAILURES
from process.sockets.encrypted_sockets import Network
from protocol import wire
from protocol.errors import ConfigError, ProtocolError
from protocol.message_base import Message
from protocol.rank_messages import NodeAccepted, NodeHello, NodeRefused, ToNode

_HELLO_S = 1.0
_MOST_HANDSHAKES = 5
"""Failed handshakes after which a node gives up. A single one may only mean that the head ends."""


class HeadLost(RuntimeError):
    """The head is gone or silent."""


class NodeLink:
    """The socket to the head at `endpoint`. Owns it."""

    def __init__(self, network: Network, endpoint: str, name: str, silence_s: float = 0.0) -> None:
        """`name` is the head's address in messages. A head that stands still keeps its connection
        for more than `silence_s`. Raises ConfigError."""
        self._name = name
        self._failures = 0
        self._is_accepted = False
        self.heard_at = time.monotonic()
        self.socket: zmq.Socket[bytes] = network.connecting(zmq.DEALER, patience_s=silence_s)
        events = HANDSHAKE_FAILURES | zmq.EVENT_DISCONNECTED
        self.monitor = self.socket.get_monitor_socket(events)
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot connect to the head at {name}: {error}") from error

    def join(self, node: int, address: str, terms: Mapping[str, str], limit_s: float) -> None:
        """Join the worker. Raises ConfigError if the head does not answer in time, refuses us, or
        has another secret."""
        hello = NodeHello(node=node, address=address, terms=dict(terms))
        end = time.monotonic() + limit_s
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self.monitor, zmq.POLLIN)
        while time.monotonic() < end:
            self.send(hello)
            hello_at = min(end, time.monotonic() + _HELLO_S)
            while (left_s := hello_at - time.monotonic()) > 0:
                poller.poll(round(left_s * 1e3))
                self.check()
                for message in self.receive():
                    if isinstance(message, NodeRefused):
                        raise ConfigError(f"the head at {self._name} refuses: {message.reason}")
                    if isinstance(message, NodeAccepted):
                        self._is_accepted = True
                        return
        raise ConfigError(
            f"no head answers at {self._name} after {limit_s:g} s: start the worker of node_rank 0 "
            "there, or mend master_addr and master_port"
        )

    def send(self, message: Message) -> None:
        """Queue a message. If the queue is full, raises HeadLost, or drops the message if the head
        has not accepted us yet."""
        try:
            self.socket.send_multipart(wire.parts(wire.encode(message)), zmq.NOBLOCK)
        except zmq.Again as error:
            if self._is_accepted:
                raise HeadLost(f"the head at {self._name} reads no more") from error

    def receive(self) -> list[ToNode]:
        """The messages that have come from the head. Raises HeadLost for an invalid one."""
        messages: list[ToNode] = []
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            self.heard_at = time.monotonic()
            try:
                messages.append(wire.decode_to_node(wire.joined(frames)))
            except ProtocolError as error:
                raise HeadLost(
                    f"the head at {self._name} sent an invalid message: {error}"
                ) from error

    def check(self) -> None:
        """Check that the connection still stands. Raises HeadLost if an accepted connection is
        lost, and ConfigError if no connection can be made."""
        while self.monitor.poll(0):
            event = parse_monitor_message(self.monitor.recv_multipart())["event"]
            if self._is_accepted:
                raise HeadLost(f"the head at {self._name} has closed the connection")
            self._failures += bool(event & HANDSHAKE_FAILURES)
        if self._failures >= _MOST_HANDSHAKES:
            raise ConfigError(
                f"what listens at {self._name} is no head of this cluster: give all nodes of a "
                "worker the same cluster_secret, and check master_addr and master_port"
            )

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; queued messages have `linger_ms` to leave. A second call does
        nothing."""
        if self.socket.closed:
            return
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=linger_ms)
