"""A transport without memory: a test sets what the transport reports, and reads what it was asked
to do."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence

from kv_transfer.transports.interface import (
    PeerReady,
    PoolMemory,
    SharesByGroup,
    TransportEvent,
    WriteDone,
)
from kv_transfer.transports.memory_file import SharedMemory
from protocol.errors import PoolMismatch, TransferError


class FakeTransport:
    """Peers whose name starts with "bad" cannot be added, the pools of those whose name starts with
    "unfit" do not fit, and those whose name starts with "slow" are ready once the test says so;
    removing a peer fails its writes."""

    name = "fake"
    paths = ("by hand",)
    is_disconnecting = False

    def __init__(self, agent: str = "fake-agent") -> None:
        self.agent = agent
        self.peers: set[str] = set()
        self.writes: dict[int, str] = {}
        self.reports: deque[TransportEvent] = deque()  # tests append from their thread
        self.poll_error: Exception | None = None
        self.is_closed = False
        self.spares: list[str] = []  # names of ends that peers may get
        self.retired: list[str] = []
        self.disconnected: list[set[str]] = []
        self.expected: list[bool] = []
        self.pool: PoolMemory | None = None
        self.num_posted = 0
        self.num_polls = 0

    def allocate(self, num_bytes: int) -> SharedMemory | None:
        return None

    def register(self, pool: PoolMemory) -> None:
        if self.pool is not None:
            raise ValueError("a pool is registered already")
        self.pool = pool

    def descriptor(self) -> bytes:
        return b"fake descriptor"

    def add_peer(
        self, agent: str, descriptor: bytes, num_blocks: int, shares: SharesByGroup = ()
    ) -> None:
        if agent.startswith("bad"):
            raise TransferError("a bad peer")
        if agent.startswith("unfit"):
            raise PoolMismatch("another pool")
        self.peers.add(agent)
        if not agent.startswith("slow"):
            self.reports.append(PeerReady(agent))

    def remove_peer(self, agent: str) -> None:
        if agent in self.peers:
            self.peers.remove(agent)
            for handle, target in list(self.writes.items()):
                if target == agent:
                    self.finish(handle, "the peer was removed")

    def post_write(
        self,
        agent: str,
        source_blocks: Sequence[int],
        target_blocks: Sequence[int],
        notification: bytes,
        group: int = 0,
        post_before: float = math.inf,
    ) -> int:
        if agent not in self.peers:
            raise TransferError(f"peer {agent} is not known")
        if not source_blocks:
            raise TransferError("no blocks")
        if len(source_blocks) != len(target_blocks):
            raise PoolMismatch("other blocks")
        if notification == b"bug":
            raise ZeroDivisionError("a bug")
        self.num_posted += 1
        self.writes[self.num_posted] = agent
        return self.num_posted

    def finish(self, handle: int, error: str | None = None) -> None:
        del self.writes[handle]
        self.reports.append(WriteDone(handle, error))

    def poll(self) -> list[TransportEvent]:
        self.num_polls += 1
        if self.poll_error is not None:
            raise self.poll_error
        return [self.reports.popleft() for _ in range(len(self.reports))]

    def disconnect(self, kept: Collection[str]) -> int:
        self.disconnected.append(set(kept))
        return 1

    def expect(self, data: bool) -> None:
        self.expected.append(data)

    def renew(self, failed: str) -> bool:
        if self.spares:
            self.agent = self.spares.pop(0)
        return self.agent != failed

    def retire(self, agent: str) -> None:
        self.retired.append(agent)

    def close(self) -> None:
        self.is_closed = True
