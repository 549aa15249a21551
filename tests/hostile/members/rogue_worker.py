"""A worker that has the cluster's secret and sends what no honest worker would."""

from __future__ import annotations

import contextlib
import time
import uuid

import msgspec
import zmq

from process.sockets.control import ControlServer
from process.sockets.encrypted_sockets import Network
from process.sockets.events import EventPublisher
from process.sockets.hello import HelloPolicy
from process.store.worker_lease import WorkerLease
from protocol import wire
from protocol.registration import WorkerInfo

_WAIT_S = 60.0


class RogueWorker:
    """A registered worker that sends the router `frames` and `events`, and answers nothing."""

    def __init__(self, secret: str, redis_url: str, honest: WorkerInfo) -> None:
        """The worker registers like `honest`, with a name and addresses of its own."""
        self._network = Network(secret)
        policy = HelloPolicy("rogue", uuid.uuid4().hex, "", "")
        self._server = ControlServer(self._network, "tcp://127.0.0.1:*", policy, silence_s=60.0)
        self._publisher = EventPublisher(self._network, "tcp://127.0.0.1:*")
        self.info = msgspec.structs.replace(
            honest,
            worker_id="rogue",
            incarnation=policy.incarnation,
            control=self._server.endpoint,
            events=self._publisher.endpoint,
            max_context=1,  # so that it gets no requests
        )
        self._lease = WorkerLease(redis_url, "default", self.info, 20.0)
        self._lease.start()

    def lie(self, frames: list[bytes], events: list[bytes]) -> None:
        """Send all frames and events. A lie may end the connection; then the rest is sent over the
        next connection."""
        for frame in frames:
            while not self._try_send(frame):
                pass
        for event in events:
            self._publisher._socket.send_multipart(wire.parts(event))

    def send_without_end(self, frames: list[bytes]) -> None:
        """Send one message of very many frames, and wait until the router has ended the
        connection and comes back."""
        identity = self._server.peers[-1].identity
        with contextlib.suppress(zmq.ZMQError):
            self._server.socket.send_multipart([identity, *frames], copy=False)
        deadline = time.monotonic() + _WAIT_S
        while self._server.peers[-1].identity == identity:
            assert time.monotonic() < deadline, "the router reads on"
            self._server.socket.poll(50)
            self._server.receive()

    def _try_send(self, frame: bytes) -> bool:
        deadline = time.monotonic() + _WAIT_S
        while not self._server.receive() and not self._server.peers:
            assert time.monotonic() < deadline, "the router does not come back"
            self._server.socket.poll(50)
        peer = self._server.peers[-1]
        try:
            self._server.socket.send_multipart([peer.identity, *wire.parts(frame)])
        except zmq.ZMQError:
            self._server.drop(peer)
            return False
        return True

    def close(self) -> None:
        self._lease.close()
        self._server.close()
        self._publisher.close()
        self._network.close()
