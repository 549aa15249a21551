"""A decode worker's links, and a prefill worker's server that answers them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import zmq

from process.sockets.control import ControlServer, Peer
from process.sockets.encrypted_sockets import Network
from process.sockets.hello import HelloPolicy
from process.sockets.options import tcp_endpoint
from protocol.messages import PROTOCOL_VERSION, Abort, Hello, KvPeer, Role
from protocol.registration import WorkerInfo
from tests.registration import registration
from tests.unit.worker_harness import Clock, DecodeBench
from worker.host import Surroundings
from worker.inbound.source_links import SourcePeers

SILENCE_S = 100.0
WAIT_S = 60.0
ABORT = Abort(request_id="r", attempt=1)


class Pair:
    """The links of a decode worker, and a prefill worker's server that they lead to."""

    def __init__(
        self,
        model: str = "m",
        machine: str = "",
        pid: int = 0,
        host: str = "127.0.0.1",
        incarnation: str = "p-i",
    ) -> None:
        self.network = Network("a secret of the fleet")
        self.clock = Clock()
        policy = HelloPolicy("p", incarnation, model, "layout", machine, pid)
        any_port = tcp_endpoint(host, 0)
        self.server = ControlServer(self.network, any_port, policy, 1e9, self.clock)
        self.endpoint = self.server.endpoint
        bench = DecodeBench("d", self.clock)
        bench.close()
        hello = Hello(
            sender="d",
            role=Role.DECODE,
            protocol_version=PROTOCOL_VERSION,
            model_fingerprint="m",
            layout_fingerprint="layout",
        )
        self.alive = True
        self.info: Any = None
        self.members: list[WorkerInfo] = []
        around = Surroundings(
            network=self.network,
            hello=hello,
            descriptor=bench.descriptor,
            is_alive=lambda name, inc: self.alive,
            find=lambda name, inc: self.info,
            members=lambda: self.members,
            look_again=lambda: None,
            machine="here",
            stack=ExitStack(),
            add_check=lambda check: None,
        )
        self.poller = zmq.Poller()
        self.peers = SourcePeers(around, self.poller, SILENCE_S)
        self.peer = KvPeer(worker_id="p", incarnation="p-i", control=self.endpoint)
        self.heard: list[tuple[Peer, Any]] = []

    def exchange(self, until: Callable[[], object]) -> None:
        """Both sides' loops, until something has come about."""
        deadline = time.monotonic() + WAIT_S
        while not until():
            assert time.monotonic() < deadline, "it did not come about"
            self.server.socket.poll(1)
            self.heard += self.server.receive()

    def serve(self) -> None:
        """One turn of the server alone."""
        self.heard += self.server.receive()

    def num_answered(self) -> int:
        """The peers that have accepted us."""
        return sum(each.control.accepted is not None for each in self.peers._links.values())

    def silence(self, incarnation: str) -> None:
        """This peer has said nothing for long."""
        self.peers._links[incarnation].control.last_heard -= 2 * SILENCE_S

    def close(self) -> None:
        self.peers.close()
        assert self.poller.sockets == []
        self.server.close()
        self.network.close()


def introduce(pair: Pair) -> None:
    pair.peers.connect(pair.peer)
    pair.peers.connect(pair.peer)  # is open already
    assert pair.peers.num_links == 1
    pair.exchange(lambda: pair.peers.receive() or pair.heard)


def member(pair: Pair, **changes: Any) -> WorkerInfo:
    """The prefill worker's registration."""
    fields = {
        "worker_id": "p",
        "incarnation": "p-i",
        "role": Role.PREFILL,
        "control": pair.endpoint,
        "model_fingerprint": "m",
        "layout_fingerprint": "layout",
        "transport": "fake",
    }
    return registration(**(fields | changes))
