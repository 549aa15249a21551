"""Workers whose pools have an end of their own, and ends far away."""

from __future__ import annotations

import math
from collections.abc import Callable

from kv_transfer.head_slices import plan_shares
from kv_transfer.transports.distant_end import DistantHost, open_ends
from kv_transfer.transports.end_messages import (
    AddPeer,
    EndOrder,
    EndReport,
    Opened,
    OpenEnd,
    PeerIsReady,
    decode_order,
    encode,
)
from kv_transfer.transports.interface import (
    PeerReady,
    PoolMemory,
    SharesByGroup,
)
from kv_transfer.transports.joined import JoinedTransport
from kv_transfer.transports.joined_descriptor import EndOfPool, encode_ends
from protocol.errors import TransferError
from protocol.layout import KvLayout
from tests.layouts import divisible_layout
from tests.unit.kv_transfer.fake_transport import FakeTransport

ONE = divisible_layout()
TWO, STAGES = ONE.shard(0, 2), ONE.shard(0, 1, 1, 2)
POOL = PoolMemory(4096, 64, 8, "cpu")
NOTE = b"note"


class First(FakeTransport):
    """The end on the head's host."""

    def __init__(self) -> None:
        super().__init__("first")
        self.shares: dict[str, SharesByGroup] = {}
        self.notes: list[tuple[str, bytes]] = []
        self.posted: list[tuple[str, bytes]] = []
        self.post_before: list[object] = []

    def add_peer(
        self, agent: str, descriptor: bytes, num_blocks: int, shares: SharesByGroup = ()
    ) -> None:
        super().add_peer(agent, descriptor, num_blocks, shares)
        self.shares[agent] = shares

    def post_write(self, agent: str, *rest: object) -> int:  # type: ignore[override]
        handle = super().post_write(agent, *rest)  # type: ignore[arg-type]
        self.posted.append((agent, rest[2]))  # type: ignore[arg-type]
        self.post_before += rest[4:]
        return handle

    def notify(self, agent: str, payload: bytes) -> None:
        if agent not in self.peers:
            raise TransferError(f"{agent} is gone")
        self.notes.append((agent, payload))


class Far:
    """Another host, which does what a test says."""

    def __init__(self) -> None:
        self.orders: list[EndOrder] = []
        self.host = DistantHost(self._take)
        self.answers: dict[type, Callable[[int], EndReport]] = {
            OpenEnd: lambda end: Opened(end, "far", b"of far", 1),
        }

    def _take(self, data: bytes) -> None:
        order = decode_order(data)
        self.orders.append(order)
        answer = self.answers.get(type(order))
        if answer is not None:
            self.host.take(encode(answer(order.end)))

    def says(self, report: EndReport) -> None:
        self.host.take(encode(report))

    def last(self, kind: type) -> EndOrder:
        return [each for each in self.orders if isinstance(each, kind)][-1]


class Worker:
    """A worker of two ranks, one of them on another host."""

    def __init__(self) -> None:
        self.first, self.far = First(), Far()
        self.transport = JoinedTransport(self.first, lambda: open_ends([self.far.host]))
        self.transport.register(POOL)

    def add(self, theirs: KvLayout, descriptor: bytes = b"where", ours: KvLayout = TWO) -> None:
        self.transport.add_peer("peer", descriptor, 8, plan_shares(ours, theirs))

    def ready(self, theirs: KvLayout = ONE, descriptor: bytes = b"where") -> None:
        self.add(theirs, descriptor)
        for each in self.far.orders:
            if isinstance(each, AddPeer):
                self.far.says(PeerIsReady(each.end, each.agent))
        assert self.transport.poll() == [PeerReady("peer")]

    def post(self, post_before: float = math.inf) -> int:
        return self.transport.post_write("peer", [1], [2], NOTE, 0, post_before)


def spread(*names: str) -> bytes:
    return encode_ends([EndOfPool(name, 1, f"of {name}".encode()) for name in names])
