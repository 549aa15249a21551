"""The control plane's sockets: a worker's server, to which peers connect, and a peer's link to a
server.

Both speak `protocol.messages` over ZeroMQ ROUTER and DEALER. A peer must send an acceptable Hello
before any other message. Frames that are foreign, corrupt or from unknown peers are counted and
dropped, without an error. Every sender has proved the cluster's secret
(`process.sockets.encrypted_sockets`). Server and link never block and do not interpret the
messages; the server counts the requests among them.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import zmq

from process.clock import wall_us
from process.sockets.encrypted_sockets import Network
from process.sockets.hello import NO_HELLO, HelloPolicy
from process.sockets.inflow import Inflow, next_frames, wire_bytes
from protocol import wire
from protocol.control_message import ControlMessage
from protocol.errors import ProtocolError
from protocol.message_base import Message
from protocol.messages import (
    Generate,
    Hello,
    HelloAccepted,
    HelloRefused,
    Ping,
    Pong,
    Prefill,
    Role,
)

log = logging.getLogger(__name__)

MAX_DRAIN = 4096
MAX_RECEIVE_S = 0.05
"""Reading stops after this time, so that the worker can step. The remaining messages wait for the
next turn."""
MAX_UNREAD_BYTES = 512 * 1024 * 1024
"""The most unread bytes of all peers of a server together: a worker reads nothing while it computes
a long step."""
MAX_UNREAD_OF_LINK = 128 * 1024 * 1024
_ADDRESS = "Peer-Address"
"""ZeroMQ's name for the IP address from which a message came."""
Clock = Callable[[], float]


@dataclass(frozen=True)
class Peer:
    """The other end of a connection; a reconnected process is a new peer. A router's `session`
    names the connection."""

    identity: bytes
    name: str
    role: Role
    session: str = ""


class ControlServer:
    """A worker's ROUTER socket and the peers whose Hello was accepted. Owns the socket.

    `refused` counts dropped frames by reason: undecodable, foreign, no_hello, incompatible,
    unusable.
    `undeliverable` counts messages to lost peers. `socket` is for a Poller.
    """

    def __init__(
        self,
        network: Network,
        endpoint: str,
        policy: HelloPolicy,
        silence_s: float,
        clock: Clock = time.monotonic,
    ) -> None:
        """Binds to `endpoint` (`tcp://host:*` for any free port). Raises ConfigError."""
        self.socket: zmq.Socket[bytes]
        self._inflow = Inflow(MAX_UNREAD_BYTES)
        self.socket, self.endpoint = network.listening(zmq.ROUTER, endpoint, self._inflow)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.refused: Counter[str] = Counter()
        self.undeliverable = 0
        self._network = network
        self._policy = policy
        self._silence_s = silence_s
        self._clock = clock
        self._peers: dict[bytes, Peer] = {}
        self._last_heard: dict[bytes, float] = {}
        self._num_legs: Counter[bytes] = Counter()
        self._unreachable: list[Peer] = []
        self._drained = True

    @property
    def peers(self) -> list[Peer]:
        """All connected and accepted peers."""
        return list(self._peers.values())

    @property
    def legs_received(self) -> dict[str, int]:
        """The number of Generate and Prefill messages that each session of a router has sent."""
        return {self._peers[each].session: count for each, count in self._num_legs.items()}

    @property
    def num_ended(self) -> int:
        """Connections that were ended because their peers sent more than could be read."""
        return self._inflow.num_ended

    @property
    def num_turned_away(self) -> int:
        """Connections to any socket of the process that did not prove the cluster's secret."""
        return self._network.num_turned_away

    def receive(self) -> list[tuple[Peer, ControlMessage]]:
        """Messages of peers, in order per peer. Hello and Ping are answered here, not returned."""
        received: list[tuple[Peer, ControlMessage]] = []
        self._drained = False
        end = time.perf_counter() + MAX_RECEIVE_S
        for _ in range(MAX_DRAIN):
            try:
                taken = self._take(next_frames(self.socket, self._inflow))
            except zmq.Again:
                self._drained = True
                break
            if taken is not None:
                received.append(taken)
            if time.perf_counter() >= end:
                break
        return received

    def send(self, peer: Peer, message: Message) -> bool:
        """Queue a message. If the peer is gone, count the message and return False; `lost` will
        report the peer."""
        if self._send(peer.identity, message):
            return True
        self.undeliverable += 1
        if self._forget(peer.identity):
            self._unreachable.append(peer)
        return False

    def lost(self, now: float) -> list[Peer]:
        """Peers that became unreachable or silent since the last call; they are forgotten. Call it
        after `receive`, so that messages that arrived during a long step count."""
        gone, self._unreachable = self._unreachable, []
        if self._drained:
            horizon = now - self._silence_s
            for identity, heard in list(self._last_heard.items()):
                if heard < horizon:
                    gone.append(self._peers[identity])
                    self._forget(identity)
        return gone

    def drop(self, peer: Peer) -> None:
        """End a connection whose messages cannot be handled: `lost` reports the peer, which must
        send Hello again."""
        if self._forget(peer.identity):
            self.refused["unusable"] += 1
            self._unreachable.append(peer)

    def reincarnate(self, incarnation: str) -> None:
        """Become a new incarnation: all connected peers are lost and must send Hello again."""
        self._policy = replace(self._policy, incarnation=incarnation)
        self._unreachable += self._peers.values()
        self._peers.clear()
        self._last_heard.clear()
        self._num_legs.clear()

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; queued messages have `linger_ms` to leave."""
        self.socket.close(linger=linger_ms)

    def _take(self, frames: list[bytes]) -> tuple[Peer, ControlMessage] | None:
        identity, *parts = frames
        if not parts:
            self.refused["foreign"] += 1
            return None
        try:
            message = wire.decode_control(wire.joined(parts))
        except ProtocolError as error:
            self.refused["undecodable"] += 1
            log.debug("dropped a frame: %s", error)
            return None
        if isinstance(message, Hello):
            self._greet(identity, message)
            return None
        peer = self._peers.get(identity)
        if peer is None:
            self.refused["no_hello"] += 1
            self._send(identity, NO_HELLO)
            return None
        self._last_heard[identity] = self._clock()
        match message:
            case Ping():
                self._send(identity, Pong(nonce=message.nonce, wall_us=wall_us()))
            case Pong():
                pass
            case Generate() | Prefill():
                self._num_legs[identity] += 1
                return peer, message
            case HelloAccepted() | HelloRefused():
                self.refused["foreign"] += 1
            case _:
                return peer, message
        return None

    def _greet(self, identity: bytes, hello: Hello) -> None:
        answer = self._policy.answer(hello)
        if isinstance(answer, HelloRefused):
            self.refused["incompatible"] += 1
            log.warning(
                "refused %s %s: its %s is %s, ours is %s",
                hello.role.value,
                hello.sender,
                answer.what,
                answer.theirs,
                answer.ours,
            )
            former = self._peers.get(identity)
            if former is not None and self._forget(identity):
                self._unreachable.append(former)
        else:
            self._peers[identity] = Peer(identity, hello.sender, hello.role, hello.session)
            self._last_heard[identity] = self._clock()
        self._send(identity, answer)

    def _send(self, identity: bytes, message: Message) -> bool:
        """Send; False if the peer's connection is gone or its queue is full."""
        try:
            self.socket.send_multipart([identity, *wire.parts(wire.encode(message))], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True

    def _forget(self, identity: bytes) -> bool:
        self._last_heard.pop(identity, None)
        self._num_legs.pop(identity, None)
        return self._peers.pop(identity, None) is not None


class ControlLink:
    """A DEALER socket that is connected to one worker's control server. Owns the socket.

    Sends Hello at once and holds messages back until Hello is accepted. `accepted` is the server's
    acceptance, `refused` its refusal, after which no messages are sent. `resets` counts how often
    the server had forgotten us and thereby dropped its work for us.
    """

    def __init__(
        self,
        network: Network,
        endpoint: str,
        hello: Hello,
        *,
        ping_interval_s: float = 1.0,
        max_held: int = 4096,
        clock: Clock = time.monotonic,
    ) -> None:
        self.endpoint = endpoint
        self.address = ""
        """The server's IP address, once it has sent something."""
        self.accepted: HelloAccepted | None = None
        self.refused: HelloRefused | None = None
        self.resets = 0
        self.dropped: Counter[str] = Counter()
        self.last_heard = clock()
        self._hello = hello
        self._ping_interval_s = ping_interval_s
        self._max_held = max_held
        self._clock = clock
        self._held: deque[Message] = deque()
        self._next_tick = clock() + ping_interval_s
        self._nonce = 0
        self._inflow = Inflow(MAX_UNREAD_OF_LINK)
        self._bytes_taken = 0
        self.socket: zmq.Socket[bytes] = network.connecting(zmq.DEALER, self._inflow)
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.socket.close()
            raise ProtocolError(f"cannot connect to {endpoint}: {error}") from error
        self._post(hello)

    def send(self, message: Message) -> bool:
        """Queue a message. If we were refused or the queue is full, count the message and return
        False."""
        sent = False
        if self.accepted is not None:
            sent = self._post(message)
        elif self.refused is None and len(self._held) < self._max_held:
            self._held.append(message)
            sent = True
        if not sent:
            self.dropped["unsent"] += 1
        return sent

    def receive(self) -> list[ControlMessage]:
        """Messages of the worker, in order; answers to Hello and Ping are handled here."""
        received: list[ControlMessage] = []
        for _ in range(MAX_DRAIN):
            try:
                frames = self._next_frames()
            except zmq.Again:
                break
            self._bytes_taken += sum(wire_bytes(len(each)) for each in frames)
            message = self._take(frames)
            if message is not None:
                received.append(message)
        self._inflow.took_in_all(self._bytes_taken)
        return received

    def tick(self, now: float) -> None:
        """Send a Ping if due, or Hello again while it is unanswered. Call it often; it is cheap."""
        if now < self._next_tick or self.refused is not None:
            return
        self._next_tick = now + self._ping_interval_s
        self._nonce += 1
        self._post(self._hello if self.accepted is None else Ping(nonce=self._nonce))

    def silent_s(self, now: float) -> float:
        """Seconds since the worker's last message."""
        return now - self.last_heard

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; queued messages have `linger_ms` to leave."""
        self._held.clear()
        self.socket.close(linger=linger_ms)

    def _next_frames(self) -> list[bytes]:
        """The frames of the next message. Raises Again."""
        if self.accepted is not None:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        self.address = str(frames[0].get(_ADDRESS)).removeprefix("::ffff:")
        return [each.bytes for each in frames]

    def _take(self, frames: list[bytes]) -> ControlMessage | None:
        try:
            message = wire.decode_control(wire.joined(frames))
        except ProtocolError as error:
            self.dropped["undecodable"] += 1
            log.debug("dropped a frame from %s: %s", self.endpoint, error)
            return None
        self.last_heard = self._clock()
        match message:
            case HelloAccepted():
                self._begin(message)
            case HelloRefused():
                self._turned_away(message)
            case Ping():
                self._post(Pong(nonce=message.nonce, wall_us=wall_us()))
            case Pong():
                pass
            case Hello():
                self.dropped["foreign"] += 1
            case _:
                return message
        return None

    def _begin(self, accepted: HelloAccepted) -> None:
        self.accepted = accepted
        while self._held:
            if not self._post(self._held.popleft()):
                self.dropped["unsent"] += 1

    def _turned_away(self, refused: HelloRefused) -> None:
        """Handle a refusal: final, or because the server forgot us; then send Hello again."""
        if refused != NO_HELLO:
            self.refused = refused
            self.accepted = None
            self._held.clear()
        elif self.accepted is not None:
            self.accepted = None
            self.resets += 1
            self._post(self._hello)

    def _post(self, message: Message) -> bool:
        try:
            self.socket.send_multipart(wire.parts(wire.encode(message)), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True
