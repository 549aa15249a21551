"""The other nodes of a worker whose ranks span several hosts, from the head's side.

A thread owns the socket. It admits nodes whose terms equal the head's, passes on messages between
the head and distant ranks, and answers the nodes' beats. If a node ends or falls silent, the worker
ends: the links of the node's ranks close, and `reason` says why. The socket never blocks. Messages
that a node does not read wait in a bounded queue; a node whose queue is full counts as lost.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

import zmq

from kv_transfer.transports.distant_end import DistantHost
from process.sockets.encrypted_sockets import Network
from process.sockets.inflow import Inflow, next_frames
from process.wakeup import Wakeup
from protocol import wire
from protocol.errors import ProtocolError
from protocol.message_base import Message
from protocol.rank_messages import (
    EndBytes,
    HeadBeat,
    NodeAccepted,
    NodeBeat,
    NodeEnds,
    NodeHello,
    NodeLeaves,
    NodeRefused,
    RankBytes,
    ToHead,
    WorkerEnds,
)

log = logging.getLogger(__name__)

MOST_BYTES = 64 * 1024 * 1024
"""The most unread bytes of all nodes together."""
BEAT_S = 0.5
READ_BYTES = 256 * 1024
_PERIOD_MS = 250
_LINGER_MS = 1000
_SAY_EVERY_S = 10.0


@dataclass
class _Node:
    """An accepted node. `ends` are the head's ends of its ranks' links, by rank."""

    identity: bytes
    name: str
    heard_at: float
    links: list[socket.socket]
    ends: dict[int, socket.socket] = field(default_factory=dict)

    def close(self) -> None:
        """Close the head's ends."""
        for link in self.links:
            link.close()


class OtherNodes:
    """All nodes except the head's own. `reason` says why the worker cannot go on; "" while it can.
    `hosts` are the ends of KV transfers on each. `note_times` takes the times of the ranks on a
    node, from the number of the first on."""

    def __init__(
        self,
        network: Network,
        endpoint: str,
        ranks: Sequence[range],
        terms: Mapping[str, str],
        silence_s: float,
        leaves: Callable[[], None],
    ) -> None:
        """Listen on `endpoint` for the nodes from 1 on, whose ranks have the numbers `ranks`, and
        who must have equal `terms`. A node counts as lost after `silence_s`. `leaves` is called
        from another thread when a node was told to stop. Raises ConfigError."""
        self.reason = ""
        self.note_times: Callable[[int, Sequence[int]], None] = lambda first, lines: None
        self.hosts = [
            DistantHost(partial(self._order, number)) for number in range(1, len(ranks) + 1)
        ]
        self._orders: SimpleQueue[tuple[int, bytes]] = SimpleQueue()  # to ends, by node
        self._ranks = ranks
        self._terms = terms
        self._silence_s = silence_s
        self._leaves = leaves
        self._nodes: dict[int, _Node] = {}
        self._changed = threading.Condition()
        self._is_complete = self._is_closing = False
        self._inflow = Inflow(MOST_BYTES)
        self._beat_at = 0.0
        self._wakeup = Wakeup()
        self._poller = zmq.Poller()
        self._socket, self.endpoint = network.listening(
            zmq.ROUTER, endpoint, self._inflow, patience_s=silence_s
        )
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._thread = threading.Thread(target=self._run, name="other-nodes", daemon=True)
        self._thread.start()

    def wait_for_all(self, limit_s: float) -> list[int]:
        """Wait until all nodes have joined, then admit no more. Returns the nodes that have not
        joined in time."""
        end, say_at = time.monotonic() + limit_s, time.monotonic() + _SAY_EVERY_S
        with self._changed:
            while missing := [node for node, _ in self._expected if node not in self._nodes]:
                now = time.monotonic()
                if now >= end:
                    return missing
                if now >= say_at:
                    say_at = now + _SAY_EVERY_S
                    log.info("waiting for nodes %s", ", ".join(map(str, missing)))
                self._changed.wait(min(end, say_at) - now)
            self._is_complete = True
        return []

    def links(self) -> list[socket.socket]:
        """The head's ends of the links of all ranks on other nodes, by number."""
        return [link for node, _ in self._expected for link in self._nodes[node].links]

    def close(self, reason: str = "") -> None:
        """End all nodes, with a reason if that is a failure."""
        if not self._is_closing:
            self._is_closing = True
            self.reason = self.reason or reason
            self._wakeup.wake()
            self._thread.join()
            self._wakeup.close()
            for node in self._nodes.values():
                node.close()

    @property
    def _expected(self) -> Sequence[tuple[int, range]]:
        return list(enumerate(self._ranks, start=1))

    # -- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wakeup.fileno(), zmq.POLLIN)
        while not self._is_closing:
            self._poller.poll(_PERIOD_MS)
            self._wakeup.clear()
            self._receive()
            self._pass_on()
            self._pass_on_orders()
            self._beat()
        self._pass_on()
        for node in list(self._nodes.values()):
            self._send(node, WorkerEnds(reason=self.reason))
            self._drop_links(node)
        self._socket.close(linger=_LINGER_MS)

    def _receive(self) -> None:
        while True:
            try:
                identity, *parts = next_frames(self._socket, self._inflow)
            except zmq.Again:
                break
            try:
                self._take(identity, wire.decode_to_head(wire.joined(parts)))
            except ProtocolError as error:
                log.debug("dropped a frame: %s", error)

    def _take(self, identity: bytes, message: ToHead) -> None:
        if isinstance(message, NodeHello):
            self._greet(identity, message)
            return
        found = [(i, each) for i, each in self._nodes.items() if each.identity == identity]
        if not found:
            return
        ((number, node),) = found
        node.heard_at = time.monotonic()
        match message:
            case NodeBeat(nonce=nonce, times=times):
                self.hosts[number - 1].beat = nonce, node.heard_at
                self.note_times(self._ranks[number - 1].start, times)
            case RankBytes(rank=rank, data=data):
                self._give(node, rank, data)
            case EndBytes(data=data):
                self.hosts[number - 1].take(data)
            case NodeLeaves():
                log.info("%s was told to stop", node.name)
                self._leaves()
            case NodeEnds(reason=reason):
                self._lose(number, f"{node.name} has ended: {reason}")

    def _greet(self, identity: bytes, hello: NodeHello) -> None:
        with self._changed:
            self._admit_or_refuse(identity, hello)

    def _admit_or_refuse(self, identity: bytes, hello: NodeHello) -> None:
        refusal = self._refusal(hello)
        if refusal:
            log.warning("refused node %d at %s: %s", hello.node, hello.address, refusal)
            self._post(identity, NodeRefused(reason=refusal))
            return
        former = self._nodes.pop(hello.node, None)
        if former is not None:
            self._drop_links(former)
            former.close()
        node = _Node(identity, f"node {hello.node} ({hello.address})", time.monotonic(), [])
        for rank in self._ranks[hello.node - 1]:
            link, end = socket.socketpair()
            end.setblocking(False)
            node.links.append(link)
            node.ends[rank] = end
            self._poller.register(end, zmq.POLLIN)
        log.info("%s has joined", node.name)
        self._post(identity, NodeAccepted())
        self._nodes[hello.node] = node
        self._changed.notify_all()

    def _refusal(self, hello: NodeHello) -> str:
        """Why a node cannot be part of the worker; "" if it can."""
        num_nodes = 1 + len(self._ranks)
        for name, ours in self._terms.items():
            theirs = hello.terms.get(name, "none")
            if theirs != ours:
                return (
                    f"{name} is {ours} at the head and {theirs} at node {hello.node}: start all "
                    "nodes of a worker with the same settings, model and version"
                )
        if not 0 < hello.node < num_nodes:
            return f"node_rank {hello.node}: nodes beside the head have 1 to {num_nodes - 1}"
        if self._is_complete or self.reason:
            return f"node_rank {hello.node} has joined already: restart all nodes of the worker"
        return ""

    def _give(self, node: _Node, rank: int, data: bytes) -> None:
        """Give the head what a rank says. The head waits for whatever ranks say, so its links have
        room."""
        end = node.ends.get(rank)
        if end is not None:
            try:
                end.sendall(data)
            except OSError:
                self._close_end(node, rank)

    def _pass_on(self) -> None:
        """Pass on all that the head has said to distant ranks."""
        for number, node in list(self._nodes.items()):
            for rank, end in list(node.ends.items()):
                try:
                    data = end.recv(READ_BYTES)
                except BlockingIOError:
                    continue
                except OSError:
                    data = b""
                if not data:
                    self._close_end(node, rank)
                elif not self._send(node, RankBytes(rank=rank, data=data)):
                    self._lose(number, f"{node.name} is gone, or reads no more steps")
                    break

    def _order(self, number: int, data: bytes) -> None:
        """Queue an order to an end on a node; any thread calls this."""
        self._orders.put((number, data))
        self._wakeup.wake()

    def _pass_on_orders(self) -> None:
        """Pass on what the ends on other nodes are told. Those of a lost node end with the
        worker."""
        for _ in range(self._orders.qsize()):
            number, data = self._orders.get()
            node = self._nodes.get(number)
            if node is not None and not self._send(node, EndBytes(data=data)):
                self._lose(number, f"{node.name} is gone, or reads no more orders")

    def _beat(self) -> None:
        """Send a beat to the nodes, and find those that are silent."""
        now = time.monotonic()
        if now < self._beat_at:
            return
        self._beat_at = now + BEAT_S
        for number, node in list(self._nodes.items()):
            if node.heard_at < now - self._silence_s:
                self._lose(number, f"{node.name} has said nothing for {self._silence_s:g} s")
            elif not self._send(node, HeadBeat()):
                self._lose(number, f"{node.name} has closed the connection")

    def _lose(self, number: int, reason: str) -> None:
        """Forget the node if others are still awaited, because it may come back; otherwise end
        all."""
        node = self._nodes[number]
        with self._changed:
            is_final = self._is_complete
            if is_final:
                self.reason = self.reason or reason
            else:
                del self._nodes[number]
        self._drop_links(node)
        if not is_final:
            log.warning("%s", reason)
            node.close()

    def _drop_links(self, node: _Node) -> None:
        for rank in list(node.ends):
            self._close_end(node, rank)

    def _close_end(self, node: _Node, rank: int) -> None:
        end = node.ends.pop(rank)
        self._poller.unregister(end)
        end.close()

    def _send(self, node: _Node, message: Message) -> bool:
        return self._post(node.identity, message)

    def _post(self, identity: bytes, message: Message) -> bool:
        parts = wire.parts(wire.encode(message))
        try:
            self._socket.send_multipart([identity, *parts], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True
