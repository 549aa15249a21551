"""What a worker speaks to others by, for tests that carry each message and each write themselves:
a control server, a transfer service, a decode worker's links to prefill workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kv_transfer.transfer_loop import (
    PeerAdded,
    PeerFailed,
    TargetRenewed,
    TransferEvent,
    WriteCommand,
    WriteFinished,
)
from kv_transfer.transports.interface import SharesByGroup
from process.sockets.control import Peer
from protocol.handoff_messages import KvAsk, KvBegun, PeerDescriptor, PoolRefused
from protocol.message_base import Message
from protocol.messages import KvPeer


class FakeServer:
    """A control server: a test puts messages in, and reads what was sent."""

    def __init__(self, fileno: int) -> None:
        self.socket = fileno
        self.refused: dict[str, int] = {}
        self.num_turned_away = self.num_ended = 0
        self.inbox: list[tuple[Peer, Any]] = []
        self.sent: list[tuple[Peer, Message]] = []
        self.gone: list[Peer] = []
        self.peers: list[Peer] = []  # the connected peers, as far as a worker asks for them
        self.incarnations: list[str] = []  # after the first

    def receive(self) -> list[tuple[Peer, Any]]:
        inbox, self.inbox = self.inbox, []
        return inbox

    def send(self, peer: Peer, message: Message) -> bool:
        self.sent.append((peer, message))
        return True

    def lost(self, now: float) -> list[Peer]:
        gone, self.gone = self.gone, []
        return gone

    def drop(self, peer: Peer) -> None:
        self.gone.append(peer)

    def reincarnate(self, incarnation: str) -> None:
        self.incarnations.append(incarnation)


@dataclass
class Write:
    """A write that was given to the transfer thread and has not finished; it may be posted once
    `fence` is passed."""

    key: int
    agent: str
    source_blocks: tuple[int, ...]
    target_blocks: tuple[int, ...]
    notification: bytes
    fence: Any
    group: int = 0


class FakeTransfers:
    """A transfer service: a test lets writes land or fail."""

    transport_name = "fake"
    paths = ()

    def __init__(self, agent: str) -> None:
        self.agent = agent
        self.peers: set[str] = set()
        self.writes: list[Write] = []
        self.fences: list[Any] = []  # of all writes so far
        self.events: list[TransferEvent] = []
        self.disconnected: list[set[str]] = []  # the agents that each call spared
        self.is_disconnecting = False
        self.spares: list[str] = []  # ends that peers may get
        self.names = {agent}  # of all ends so far
        self.retired: list[str] = []

    def add_peer(
        self, agent: str, descriptor: bytes, num_blocks: int, shares: SharesByGroup = ()
    ) -> None:
        self.peers.add(agent)
        self.events.append(PeerAdded(agent))

    def remove_peer(self, agent: str) -> None:
        self.peers.discard(agent)
        for write in [write for write in self.writes if write.agent == agent]:
            self.fail(write, "the peer was removed")

    def write(self, command: WriteCommand) -> None:
        assert isinstance(command.key, int)
        source, target = tuple(command.source_blocks), tuple(command.target_blocks)
        notification, fence = command.notification, command.computed
        write = Write(
            command.key, command.agent, source, target, notification, fence, command.group
        )
        self.writes.append(write)
        self.fences.append(fence)
        if command.agent not in self.peers:
            self.fail(write, "the peer is not known")

    def fail(self, write: Write, reason: str) -> None:
        self.writes.remove(write)
        self.events.append(WriteFinished(write.key, reason, 1, 2))

    def break_way(self, agent: str, is_mismatch: bool = False) -> None:
        """Let the connection to a peer fail, and its writes with it."""
        self.remove_peer(agent)
        self.events.append(PeerFailed(agent, "the way is broken", is_mismatch))

    def expect(self, data: bool) -> None:
        pass

    def renew(self, failed: str) -> None:
        if self.spares:
            agent = self.spares.pop(0)
            self.names.add(agent)
            self.events.append(TargetRenewed(failed, agent, b"there"))

    def retire(self, agent: str) -> None:
        self.retired.append(agent)

    def disconnect(self, kept: set[str]) -> int:
        self.disconnected.append(kept)
        return 1

    def drain(self) -> list[TransferEvent]:
        events, self.events = self.events, []
        return events


class FakePeers:
    """A worker's links to sources: a test carries the messages. If `answers_asks`,
    every ask is answered at once: the source has begun."""

    def __init__(self, descriptor: PeerDescriptor) -> None:
        """`descriptor` is that of our pool."""
        self.answers_asks = True
        self.descriptor = descriptor
        self.introduced: dict[str, PeerDescriptor] = {}  # peers that got another descriptor
        self.refusals: dict[str, str] = {}
        self.refused = 0
        self.connected: list[str] = []
        self.answering: set[str] = set()  # whose answer to our Hello has come
        self.sent: list[tuple[str, Message]] = []
        self.inbox: list[tuple[str, Any]] = []
        self.dead: list[str] = []
        self.forgotten: list[str] = []
        self.mute: list[str] = []
        self.lapsed: set[str] = set()  # lost on other machines
        self.others: list[KvPeer] = []  # workers that can use our blocks, and we theirs
        self.others_by_now: list[KvPeer] | None = None  # if our view of them is old
        self.num_looks = 0

    @property
    def agents(self) -> set[str]:
        return {self.descriptor.agent, *(each.agent for each in self.introduced.values())}

    def agent_for(self, incarnation: str) -> str:
        return self.introduced.get(incarnation, self.descriptor).agent

    def introduce(self, incarnation: str, descriptor: PeerDescriptor) -> None:
        self.introduced[incarnation] = descriptor
        self.sent.append((incarnation, descriptor))

    def connect_new(self, now: float) -> None:
        pass

    def note_refusal(self, incarnation: str, refused: PoolRefused) -> None:
        self.refusals[incarnation] = refused.reason

    def retry_closed(self) -> None:
        pass

    def obstacles(self, now: float) -> dict[str, str | None]:
        return {}

    is_seen_to_drain = True

    def look_again(self) -> None:
        """Update the view of the fleet to `others_by_now`."""
        self.num_looks += 1
        if self.others_by_now is not None:
            self.others = self.others_by_now

    def takers(self) -> list[KvPeer]:
        return self.others

    def leaving(self, worker_id: str) -> KvPeer | None:
        return next((each for each in self.others if each.worker_id == worker_id), None)

    def connect(self, peer: KvPeer, is_leaving: bool = False) -> None:
        if peer.incarnation not in self.connected:
            self.connected.append(peer.incarnation)

    def is_answering(self, incarnation: str, now: float) -> bool:
        return incarnation in self.answering and incarnation not in self.mute

    def is_connecting(self, incarnation: str) -> bool:
        return incarnation in self.connected and incarnation not in self.answering

    def send(self, incarnation: str, message: Message) -> None:
        self.sent.append((incarnation, message))
        if isinstance(message, KvAsk) and self.answers_asks:
            begun = KvBegun(request_id=message.request_id, attempt=message.attempt)
            self.inbox.append((incarnation, begun))

    def receive(self) -> list[tuple[str, Any]]:
        inbox, self.inbox = self.inbox, []
        return inbox

    def take_lost(self, now: float) -> list[str]:
        dead, self.dead = self.dead, []
        return dead

    def neighbours_of_lapsed(self, incarnation: str) -> set[str] | None:
        return {"10.0.0.2"} if incarnation in self.lapsed else None

    def reset(self) -> list[str]:
        forgotten, self.forgotten = self.forgotten, []
        return forgotten

    def silent(self, now: float) -> list[str]:
        return self.mute
