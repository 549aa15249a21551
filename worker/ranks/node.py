"""One node of a worker whose ranks span several hosts, beside the head's.

Starts the hands of its host, gives them the memory for their KV pools, and passes on messages
between them and the head. The head moves the blocks in this memory through ends of KV transfers
here. A node ends with the worker: when the head says so, is gone or falls silent, or when a hand
ends. In the last case it tells the head. Its hands end with it.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import zmq

from engine.parallel.sums import RankLost
from kv_transfer.end_server import EndFailed, EndServer
from kv_transfer.transports.interface import Transport
from kv_transfer.transports.memory_file import SharedMemory, address_of
from process.lifecycle import StopSignal
from process.wakeup import Wakeup
from protocol.error_line import one_line
from protocol.errors import ConfigError
from protocol.rank_messages import (
    EndBytes,
    HeadBeat,
    NodeBeat,
    NodeEnds,
    NodeLeaves,
    RankBytes,
    ToNode,
    WorkerEnds,
)
from worker.ranks.host_ranks import HostRanks
from worker.ranks.link import OwnPool, Wanted, receive
from worker.ranks.node_link import HeadLost, NodeLink
from worker.ranks.other_nodes import BEAT_S
from worker.ranks.pool_memory import pool_on_node
from worker.ranks.processes import HandProcesses

log = logging.getLogger(__name__)

_PERIOD_MS = 250
_READ_BYTES = 256 * 1024
_LINGER_MS = 1000
_KNOWN_BEATS = 1024
_MOST_UNREAD = 64 * 1024 * 1024
"""Bytes of steps that a hand has not read; the head is at most a few steps ahead."""


@dataclass
class _Hand:
    """A hand, and the steps that do not fit into its socket yet."""

    number: int
    link: socket.socket
    steps: socket.socket
    unsent: bytearray
    has_loaded: bool = False
    has_ended: bool = False


class Node:
    """Runs the node until the worker ends."""

    def __init__(
        self,
        link: NodeLink,
        hands: HandProcesses,
        shared: HostRanks,
        silence_s: float,
        stop: StopSignal,
        wakeup: Wakeup,
    ) -> None:
        """`wakeup` is what `stop` wakes."""
        self._link = link
        self._processes = hands
        self._shared = shared
        self._numbers = numbers = hands.numbers
        self._silence_s = silence_s
        self._wakeup = wakeup
        self._stop = stop
        self.turned_at = time.monotonic()
        self.is_draining = self.is_stalled = False
        self._memory: SharedMemory | None = None
        self._allocation: Future[SharedMemory] | None = None
        self._threads = ThreadPoolExecutor(1, "kv-memory")
        self._beat_at, self._nonce = 0.0, 0
        self._sent_at: dict[int, float] = {}  # of the last beats, by nonce
        self._open_transport: Callable[[], Transport] | None = None
        self._pools: dict[int, OwnPool] = {}  # by rank
        self._ends: EndServer | None = None
        self._early_orders: list[bytes] = []  # that came before all hands had loaded
        self._poller = zmq.Poller()
        self._hands = [
            _Hand(number, hand, steps, bytearray())
            for number, hand, steps in zip(numbers, hands.links, hands.steps, strict=True)
        ]
        for each in self._hands:
            each.steps.setblocking(False)

    @property
    def is_registered(self) -> bool:
        """Whether all hands have loaded."""
        return all(each.has_loaded for each in self._hands)

    def run(self, open_transport: Callable[[], Transport]) -> str:
        """Returns when the worker ends: why, "" if it was told to. Raises HeadLost. Ends of KV
        transfers use `open_transport`."""
        self._open_transport = open_transport
        poller = self._poller
        poller.register(self._link.socket, zmq.POLLIN)
        poller.register(self._link.monitor, zmq.POLLIN)
        poller.register(self._wakeup.fileno(), zmq.POLLIN)
        for each in self._hands:
            poller.register(each.link, zmq.POLLIN)
            poller.register(each.steps, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(_PERIOD_MS))
            self._wakeup.clear()
            self.turned_at = time.monotonic()
            for message in self._link.receive():
                if isinstance(message, WorkerEnds):
                    return message.reason
                self._follow(message)
            self._link.check()
            served = [self._serve(hand, ready) for hand in self._hands]
            for reason in (*served, self._give_memory(), self._report()):
                if reason:
                    self._link.send(NodeEnds(reason=reason))
                    return reason
            self._beat()

    def close(self) -> None:
        """Close the ends, and end the hands."""
        if self._ends is not None:
            self._ends.close()
        self._processes.close()
        self._threads.shutdown()
        if self._memory is not None:
            self._memory.close()
        self._link.close(_LINGER_MS)

    def _follow(self, message: ToNode) -> None:
        match message:
            case RankBytes(rank=rank, data=data) if rank in self._numbers:
                self._hands[rank - self._numbers.start].unsent += data
            case EndBytes(data=data):
                if self._ends is None:
                    self._early_orders.append(data)
                else:
                    self._ends.take(data)
            case HeadBeat():
                for hand in self._hands:
                    _tell_of_head(hand)

    def _serve(self, hand: _Hand, ready: Mapping[object, int]) -> str:
        """Pass on messages between a hand and the head. Returns why the worker cannot go on, or
        ""."""
        if hand.has_ended:
            return ""
        try:
            if hand.link.fileno() in ready and not hand.has_loaded:
                self._answer(hand)
            while (data := _read(hand.steps)) is not None:
                if not data:
                    return self._ended(hand)
                self._link.send(RankBytes(rank=hand.number, data=data))
            _write(hand)
        except (OSError, RankLost):
            return self._ended(hand)
        self._poller.modify(hand.steps, zmq.POLLIN | (zmq.POLLOUT if hand.unsent else 0))
        is_full = len(hand.unsent) > _MOST_UNREAD
        return f"rank {hand.number} takes no more steps" if is_full else ""

    def _answer(self, hand: _Hand) -> None:
        """Allocate memory for all hands when the first one asks for it, and note which hands have
        loaded."""
        message, _ = receive(hand.link)
        if isinstance(message, Wanted) and self._allocation is None:
            # in a thread, because much memory takes longer than the head waits for a beat
            self._allocation = self._threads.submit(SharedMemory, message.num_bytes)
            self._allocation.add_done_callback(lambda _: self._wakeup.wake())
        elif isinstance(message, OwnPool):
            hand.has_loaded = True
            hand.link.setblocking(False)
            self._poller.unregister(hand.link)
            log.info("rank %d has loaded", hand.number)
            self._pools[hand.number] = message
            if self.is_registered:
                self._serve_ends()

    def _give_memory(self) -> str:
        """Give the hands their memory once it is allocated. Returns why the worker cannot go on, or
        ""."""
        if self._memory is None and self._allocation is not None and self._allocation.done():
            try:
                self._memory = self._allocation.result()
            except ConfigError as error:
                return one_line(error)
            with contextlib.suppress(RankLost):  # the link of a hand that has ended says so
                self._processes.give(self._memory)
        return ""

    def _serve_ends(self) -> None:
        """Carry out the orders to ends of KV transfers from now on."""
        assert self._memory is not None
        assert self._open_transport is not None
        pools = [self._pools[number] for number in self._numbers]
        pool = pool_on_node(pools, address_of(self._memory.view))
        wake = self._wakeup.wake
        self._ends = EndServer(self._open_transport, pool, self._sent_at.get, wake)
        for data in self._early_orders:
            self._ends.take(data)
        self._early_orders.clear()

    def _report(self) -> str:
        """Tell the head what the ends report; returns why the worker cannot go on, or ""."""
        try:
            for data in [] if self._ends is None else self._ends.drain():
                self._link.send(EndBytes(data=data))
        except EndFailed as error:
            return str(error)
        return ""

    def _ended(self, hand: _Hand) -> str:
        """How a hand has ended; "" if the head told it to."""
        self._poller.unregister(hand.steps)
        if not hand.has_loaded:
            self._poller.unregister(hand.link)
        hand.has_ended = True
        how = self._processes.how_ended(hand.number - self._numbers.start)
        return "" if how == "with status 0" else f"rank {hand.number} has ended {how}"

    def _beat(self) -> None:
        """Tell the head that we are there, and whether we were told to stop. Raises HeadLost."""
        now = time.monotonic()
        if now - self._link.heard_at > self._silence_s:
            raise HeadLost(f"the head has said nothing for {self._silence_s:g} s")
        if self._stop.is_set and not self.is_draining:
            self.is_draining = True
            self._link.send(NodeLeaves())
        if now >= self._beat_at:
            self._beat_at, self._nonce = now + BEAT_S, self._nonce + 1
            self._sent_at[self._nonce] = now
            self._sent_at.pop(self._nonce - _KNOWN_BEATS, None)
            times = self._shared.times_of(self._numbers)
            self._link.send(NodeBeat(nonce=self._nonce, times=times))


def _read(end: socket.socket) -> bytes | None:
    """What has come; None if nothing has, b"" if the other end is closed."""
    try:
        return end.recv(_READ_BYTES)
    except BlockingIOError:
        return None


def _write(hand: _Hand) -> None:
    with contextlib.suppress(BlockingIOError):
        while hand.unsent:
            del hand.unsent[: hand.steps.send(hand.unsent)]


def _tell_of_head(hand: _Hand) -> None:
    """Tell a hand that its head is alive. A hand that stands still, or that has ended, is noticed
    elsewhere."""
    if hand.has_loaded:
        with contextlib.suppress(OSError):
            hand.link.send(b".")
