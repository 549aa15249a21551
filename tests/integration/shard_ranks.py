"""Processes of a gloo group that play the ranks of a sharded prefill and decode worker.

Ranks 0 to m - 1 of the group are a prefill worker's, the next n a decode worker's; each has a
shard of the KV pool behind a real transport. What workers tell each other over control sockets
goes in rounds over gloo here; data and notifications go by the transport. A rank that is to die
kills itself between two writes; the others see that its process has ended.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from engine.kv_pool import KvPool, block_digest
from kv_transfer.handoff.actions import (
    Begun,
    Close,
    Complete,
    Failed,
    PostWrite,
    Release,
    SendAbort,
    SendAsk,
    SendBegun,
    SendGrant,
    SendRenew,
    Unfence,
)
from kv_transfer.handoff.key import HandoffKey
from kv_transfer.handoff.shard_peer import admit_shard, describe_shard
from kv_transfer.handoff.sharded_receiver import ShardedReceiver, VerifyLane
from kv_transfer.handoff.sharded_sender import ForLane, ShardedSender
from kv_transfer.handoff.sink import HandoffSink
from kv_transfer.handoff.source import HandoffSource
from kv_transfer.head_slices import Share, shared_heads
from kv_transfer.service import TransferService
from kv_transfer.transfer_loop import NotificationArrived, PeerAdded, WriteCommand, WriteFinished
from kv_transfer.transports.interface import PoolMemory
from kv_transfer.transports.registry import create_transport
from process.process_watch import WatchedProcess
from protocol import wire
from protocol.layout import KvLayout
from protocol.messages import Abort, KvAsk, KvBegun, KvClosed, KvGrant, KvRenew, PeerDescriptor

DEADLINE_S = 60.0
LANDING_S = 0.2
SECRET = b"of the fleet"
KEY = HandoffKey("request", 1)
CACHE = KvLayout(  # of a model with 8 query heads, say, for 4 of keys and values
    model_fingerprint="model",
    dtype="float32",
    num_layers=3,
    num_kv_heads=4,
    block_size=16,
    head_dim=8,
)
PROMPT_BLOCKS = 7
FIRST_BLOCK = 1  # the decode worker has the one before
SOURCE_BLOCKS = (9, 2, 3, 11, 0, 1, 7)
TARGET_BLOCKS = (4, 12, 5, 6, 0, 9)
CHUNKS = (3, 3, 1)
POOL_BLOCKS = 13


@dataclass(frozen=True)
class Case:
    """One handoff. `dies_after`: source rank 1 ends when so many of its blocks are written."""

    transport: str
    source_size: int
    target_size: int
    checksum: bool = False
    corrupt: bool = False
    dies_after: int | None = None


def whole_cache() -> torch.Tensor:
    """Keys and values of the prompt, all heads: [PROMPT_BLOCKS, layers, 2, heads, ...]."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn((PROMPT_BLOCKS, *CACHE.block_shape), generator=generator)


class Rank:
    """What both sides have: a shard of a pool, its transport, and others' descriptors."""

    def __init__(self, case: Case, layout: KvLayout) -> None:
        self.case = case
        self.layout = layout
        self.woken = threading.Event()
        self.service = TransferService(
            lambda: create_transport(case.transport, "cpu"), self.woken.set
        )
        self.service.start()
        buffer = self.service.allocate(POOL_BLOCKS * layout.block_bytes)
        self.pool = KvPool(layout, POOL_BLOCKS, buffer=buffer)
        memory = PoolMemory(self.pool.base_address, layout.block_bytes, POOL_BLOCKS, "cpu")
        self.me = describe_shard(
            SECRET, case.transport, self.service.agent, self.service.register(memory),
            (POOL_BLOCKS, layout),
        )  # fmt: skip
        self.outbox: list[tuple[int, Any]] = []  # to ranks of the group
        self.outcome: dict[str, Any] = {}
        self.is_done = False
        self.num_arrived = 0
        self.group_done = [False]  # by rank of the group
        self.group_arrived = [0]  # blocks that the rank has whole

    def digests(self, blocks: tuple[int, ...], other: KvLayout) -> list[bytes]:
        heads = shared_heads(self.layout, other)
        return [block_digest(self.pool.part(block, heads)) for block in blocks]


class SourceRank(Rank):
    """Computes the prompt chunk by chunk, and writes to every target rank that shares heads."""

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__(case, CACHE.shard(rank, case.source_size))
        self.sender = ShardedSender(lambda: HandoffSource(0.1, max_write_blocks=2))
        self.peers: dict[int, PeerDescriptor] = {}  # by target rank
        self.added: set[str] = set()
        self.chunks = list(CHUNKS)
        self.num_ready = self.num_written = 0
        self.is_released = False
        for block, part in zip(SOURCE_BLOCKS, whole_cache(), strict=True):
            self.pool.tensor[block] = part[:, :, self.layout.heads.start : self.layout.heads.stop]

    def meet(self, group: list[tuple[int, PeerDescriptor]]) -> None:
        for rank, (_, peer) in enumerate(group[self.case.source_size :]):
            assert peer.layout is not None
            if shared_heads(self.layout, peer.layout):
                slices = admit_shard(SECRET, self.layout, self.case.transport, peer)
                self.peers[rank] = peer
                self.service.add_peer(
                    peer.agent, peer.descriptor, peer.num_blocks, [Share(0, 0, slices)]
                )
        now = time.monotonic()
        self.carry_out(self.sender.open(KEY, sorted(self.peers), PROMPT_BLOCKS, now, now + 20))
        self.carry_out(self.sender.begin(KEY, now))

    def turn(self) -> None:
        for event in self.service.drain():
            match event:
                case PeerAdded(agent):
                    self.added.add(agent)
                case WriteFinished(key=(target, write_id, count), error=error):
                    self.num_written += count if error is None else 0
                    self.carry_out(self.sender.write_finished(target, write_id, error))
        if self.case.dies_after is not None and self.layout.tp_rank == 1:
            self.die_in_time(self.case.dies_after)
        elif self.chunks and len(self.added) == len(self.peers):
            self.compute(self.chunks.pop(0))
        self.carry_out(self.sender.sweep(time.monotonic()))
        self.is_done = self.is_released

    def compute(self, count: int) -> None:
        now, blocks = time.monotonic(), SOURCE_BLOCKS[self.num_ready : self.num_ready + count]
        actions = self.sender.blocks_ready(KEY, self.num_ready, blocks, 0, now)
        self.num_ready += count
        if self.num_ready == PROMPT_BLOCKS:
            actions += self.sender.finish(KEY, now)
        self.carry_out(actions)

    def die_in_time(self, num_blocks: int) -> None:
        """In the middle: when source rank 0 has written all, and we so many blocks, which the
        target rank knows."""
        if self.num_ready == 0 and len(self.added) == len(self.peers):
            self.compute(FIRST_BLOCK + num_blocks)
        if self.num_written == num_blocks == self.group_arrived[-1] and self.group_done[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    def receive(self, sender: int, message: Any) -> None:
        target, now = sender - self.case.source_size, time.monotonic()
        match message:
            case KvAsk():
                self.carry_out(self.sender.ask(target, message, now))
            case KvGrant():
                self.carry_out(self.sender.grant(target, message, now))
            case KvRenew():
                agent = self.peers[target].agent
                self.carry_out(self.sender.renew(target, message, agent, now))
            case Abort():
                agent = self.peers[target].agent
                self.carry_out(self.sender.give_up(target, KEY, agent))

    def carry_out(self, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case ForLane(target, PostWrite() as write):
                    self.post(target, write)
                case ForLane(target, SendBegun(key)):
                    begun = KvBegun(request_id=key.request_id, attempt=key.attempt)
                    self.outbox.append((self.case.source_size + target, begun))
                case ForLane(target, Close(key, _, error)):
                    closed = KvClosed(request_id=key.request_id, attempt=key.attempt, error=error)
                    self.outbox.append((self.case.source_size + target, closed))
                case Release():
                    assert not self.is_released
                    assert self.sender.num_outstanding == 0
                    self.is_released = True

    def post(self, target: int, write: PostWrite) -> None:
        peer, digests = self.peers[target], []
        if self.case.checksum:
            assert peer.layout is not None
            digests = self.digests(write.source_blocks, peer.layout)
        if self.case.corrupt and self.layout.tp_rank == 1 and write.first_block == 5:
            self.pool.tensor[write.source_blocks[0], -1, -1, -1, -1, -1] += 1
        note = wire.encode(write.notification(digests, self.layout.tp_rank))
        key = (target, write.write_id, len(write.source_blocks))
        self.service.write(
            WriteCommand(key, peer.agent, write.source_blocks, write.target_blocks, note)
        )


class TargetRank(Rank):
    """Grants its blocks to every source rank that shares heads with it, and waits for them."""

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__(case, CACHE.shard(rank, case.target_size))
        self.receiver = ShardedReceiver(
            lambda: HandoffSink(self.service.agent, 20.0, LANDING_S, case.checksum)
        )
        self.has_answer = False
        self.sources: dict[int, KvLayout] = {}
        self.processes: dict[str, WatchedProcess] = {}
        self.outcome = {"complete": 0, "failed": [], "unfenced": 0}
        self.service.expect(True)

    def meet(self, group: list[tuple[int, PeerDescriptor]]) -> None:
        for rank, (pid, peer) in enumerate(group[: self.case.source_size]):
            assert peer.layout is not None
            if shared_heads(self.layout, peer.layout):
                self.sources[rank] = peer.layout
                self.processes[f"source {rank}"] = WatchedProcess(pid)
        peers = {rank: f"source {rank}" for rank in self.sources}
        now = time.monotonic()
        self.carry_out(self.receiver.ask(KEY, peers, now))

    def turn(self) -> None:
        for event in self.service.drain():
            if isinstance(event, NotificationArrived):
                written = wire.decode_notification(event.payload)
                self.carry_out(self.receiver.written(written.tp_rank, written))
        now = time.monotonic()
        for name, process in self.processes.items():
            if process.has_ended():
                self.carry_out(self.receiver.agent_gone(name, now))
        self.carry_out(self.receiver.sweep(now))
        self.is_done = self.has_answer and self.receiver.num_open == 0
        self.num_arrived = len(self.receiver.arrived(KEY))

    def receive(self, sender: int, message: Any) -> None:
        if isinstance(message, KvBegun):
            self.carry_out(self.receiver.begun(sender, message))
            return
        assert isinstance(message, KvClosed)
        self.carry_out(self.receiver.closed(sender, message, time.monotonic()))

    def carry_out(self, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case SendAsk(peer, message) | SendGrant(peer, message) | SendRenew(peer, message):
                    self.send(peer, message)
                case Begun():
                    now = time.monotonic()
                    self.carry_out(self.receiver.offer(KEY, FIRST_BLOCK, TARGET_BLOCKS, now))
                    self.has_answer = True
                case SendAbort(key, peer):
                    self.send(peer, Abort(request_id=key.request_id, attempt=key.attempt))
                case VerifyLane(source, verify):
                    found = self.digests(verify.blocks, self.sources[source])
                    intact = found == list(verify.digests)
                    self.carry_out(self.receiver.verified(KEY, source, intact))
                case Complete():
                    self.outcome["complete"] += 1
                    self.outcome["right"] = self.right_blocks()
                case Failed(_, reason, arrived):
                    self.has_answer = True
                    self.outcome["failed"].append((reason, arrived))
                    self.outcome["right"] = self.right_blocks()
                case Unfence():
                    self.outcome["unfenced"] += 1

    def send(self, peer: str, message: Any) -> None:
        self.outbox.append((int(peer.removeprefix("source ")), message))

    def right_blocks(self) -> tuple[list[int], bool]:
        """Prompt blocks that are what they should be, and whether other blocks are untouched."""
        heads = slice(self.layout.heads.start, self.layout.heads.stop)
        parts = whole_cache()[FIRST_BLOCK:, :, :, heads]
        right = [
            FIRST_BLOCK + index
            for index, block in enumerate(TARGET_BLOCKS)
            if torch.equal(self.pool.tensor[block], parts[index])
        ]
        others = sorted(set(range(POOL_BLOCKS)) - set(TARGET_BLOCKS))
        return right, not self.pool.tensor[others].any()


def rank_main(conn: Connection, store: str, rank: int, size: int) -> None:
    """Join the group, then play one case after the other, as they come by the pipe."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=DEADLINE_S), size, rank)
    while (case := conn.recv()) is not None:
        conn.send(play(case, rank))
    os._exit(0)  # a group that may have lost a rank is not taken down in order


def play(case: Case, rank: int) -> dict[str, Any]:
    """One rank's part in a case; returns what a target rank has seen."""
    player: SourceRank | TargetRank | None = None
    if rank < case.source_size:
        player = SourceRank(case, rank)
    elif rank < case.source_size + case.target_size:
        player = TargetRank(case, rank - case.source_size)
    group = gather(None if player is None else (os.getpid(), player.me))
    if player is None:
        return rounds(None, rank)
    player.meet([each for each in group if each is not None])
    try:
        return rounds(player, rank)
    finally:
        player.service.close()


def rounds(player: SourceRank | TargetRank | None, rank: int) -> dict[str, Any]:
    """Rounds of messages until all are done."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        mine: tuple[list[tuple[int, Any]], bool, int] = ([], True, 0)
        if player is not None:
            player.turn()
            mine, player.outbox = (player.outbox, player.is_done, player.num_arrived), []
        try:
            everybody = gather(mine)
        except RuntimeError:  # a rank is dead, and so is the group: ranks that wait hear of it
            dist.destroy_process_group()
            return alone(player)
        if all(done for _, done, _ in everybody):
            break
        if player is not None:
            player.group_done = [done for _, done, _ in everybody]
            player.group_arrived = [num_arrived for _, _, num_arrived in everybody]
            for sender, (messages, _, _) in enumerate(everybody):
                for message in [each for to, each in messages if to == rank]:
                    player.receive(sender, message)
    return {} if player is None else player.outcome


def alone(player: SourceRank | TargetRank | None) -> dict[str, Any]:
    """What a target rank makes of it when nobody answers any more."""
    deadline = time.monotonic() + DEADLINE_S
    while isinstance(player, TargetRank) and not player.is_done and time.monotonic() < deadline:
        player.woken.wait(LANDING_S / 10)
        player.woken.clear()
        player.turn()
    return {} if player is None else player.outcome


def gather(mine: Any) -> list[Any]:
    """Everybody's, by rank. Raises RuntimeError when one of them is dead."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return everybody
