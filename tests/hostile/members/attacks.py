"""Attacks of members with the right secret, and of strangers at the workers' ports, for
`python -m tests.hostile`."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec
import zmq

from process.sockets.encrypted_sockets import Network
from process.store.fleet_watcher import read_fleet
from protocol.control_message import ControlMessage
from protocol.events import EventMessage
from protocol.messages import Role, SequenceTokens, StepTokens
from protocol.registration import WorkerInfo
from tests.hostile.members.lies import lies
from tests.hostile.members.rogue_worker import RogueWorker

_CONNECTIONS = 200
_BLOCK = b"x" * 64_000
_ENDLESS = 32_000
_ENDLESS_MS = 20_000
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\x00") + bytes(32)
_BEGINNINGS = (
    b"",
    _GREETING[:11],
    _GREETING,
    _GREETING + b"\x06" + (60_000_000).to_bytes(8, "big"),
    _GREETING + b"\x04\xc8\x05HELLO" + bytes(194),
    _GREETING.replace(b"CURVE", b"NULL\x00"),
    b"GET / HTTP/1.1\r\n\r\n" * 100,
    bytes(100_000),
)


@dataclass(frozen=True)
class Insider:
    """What a compromised member knows."""

    secret: str
    redis_url: str

    def worker(self, role: Role) -> WorkerInfo:
        """An honest worker."""
        members = read_fleet(self.redis_url, "default").values()
        return next(each for each in members if each.role is role)


def _lie_as(role: Role) -> Callable[[Insider], None]:
    def run(insider: Insider) -> None:
        honest = insider.worker(role)
        with closing(RogueWorker(insider.secret, insider.redis_url, honest)) as rogue:
            names = {"worker_id": "rogue", "incarnation": rogue.info.incarnation}
            found = lies(ControlMessage, request_id="a client's")
            frames = [frame for name, frame in found if not name.startswith("Hello")]
            rogue.lie(frames, [frame for _, frame in lies(EventMessage, **names)])

    return run


def _large_messages(insider: Insider) -> None:
    """Send valid messages of several megabytes about a request that does not exist."""
    sequence = SequenceTokens(request_id="nobody's", attempt=1, index=0, token_ids=[1] * 1000)
    frame = msgspec.msgpack.encode(StepTokens(sequences=[sequence] * 1000))
    honest = insider.worker(Role.DECODE)
    with closing(RogueWorker(insider.secret, insider.redis_url, honest)) as rogue:
        rogue.lie([frame] * 20, [])


def _endless_messages(insider: Insider) -> None:
    """Send a message that does not end to every port of the workers, and from a worker to the
    router, until each connection is cut or has carried 2 GB."""
    network = Network(insider.secret)
    try:
        for role in (Role.PREFILL, Role.DECODE):
            info = insider.worker(role)
            for kind, address in ((zmq.DEALER, info.control), (zmq.XSUB, info.events)):
                with network.connecting(kind) as rogue:
                    monitor = rogue.get_monitor_socket(zmq.EVENT_DISCONNECTED)
                    rogue.connect(address)
                    for _ in range(_ENDLESS):
                        rogue.send(_BLOCK, zmq.SNDMORE, copy=False)
                    rogue.send(b"the end")
                    monitor.poll(_ENDLESS_MS)
                    rogue.disable_monitor()
                    monitor.close()
    finally:
        network.close()
    honest = insider.worker(Role.DECODE)
    with closing(RogueWorker(insider.secret, insider.redis_url, honest)) as rogue_worker:
        rogue_worker.lie([_BLOCK * 2], [])  # the worker is connected
        rogue_worker.send_without_end([_BLOCK] * _ENDLESS)


def _half_handshakes(insider: Insider) -> None:
    """Begin handshakes on the control and event ports of both roles, and hold them until all are
    open."""
    with ExitStack() as stack:
        for role in (Role.PREFILL, Role.DECODE):
            info = insider.worker(role)
            for number in range(_CONNECTIONS):
                where = urlsplit((info.control, info.events)[number % 2])
                address = (where.hostname or "", where.port or 0)
                connection = stack.enter_context(socket.create_connection(address))
                connection.setblocking(False)
                try:
                    connection.send(_BEGINNINGS[number % len(_BEGINNINGS)])
                except OSError:
                    continue  # the connection was cut off already


MEMBER_ATTACKS: dict[str, Callable[[Insider], None]] = {
    "a rogue prefill worker's lies": _lie_as(Role.PREFILL),
    "a rogue decode worker's lies": _lie_as(Role.DECODE),
    "a rogue worker's large messages": _large_messages,
    "messages without an end": _endless_messages,
    "half handshakes at the workers' ports": _half_handshakes,
}
