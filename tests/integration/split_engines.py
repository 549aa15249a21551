"""Ranks of a gloo group that are two sharded engines: one prefills a prompt and hands its KV over
to the other, of another number of ranks, which goes on from there.

Each engine is led by its first rank. Blocks move from every rank's pool straight into the pools of
those ranks of the other engine that share heads with it; who may write when is agreed in rounds
over gloo here (the machines that decide it are played in `shard_ranks`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from engine.checkpoint.config import Shard
from engine.engine import Engine
from engine.engine_config import EngineConfig
from engine.loader import load_engine, load_follower
from engine.parallel.follower import Follower
from engine.parallel.ranks import Ranks
from kv_transfer.handoff.shard_peer import admit_shard, describe_shard
from kv_transfer.head_slices import Share, shared_heads
from kv_transfer.service import TransferService
from kv_transfer.transfer_loop import NotificationArrived, WriteCommand, WriteFinished
from kv_transfer.transports.interface import PoolMemory
from kv_transfer.transports.registry import create_transport
from protocol.layout import KvLayout
from protocol.messages import PeerDescriptor
from scheduling.batch import Batch
from scheduling.scheduler import SchedulerConfig
from scheduling.sequence import Sequence
from tests.paths import DEMO_MODEL
from tests.sequences import greedy, sequence_of

DEADLINE_S = 120.0
SECRET = b"of the fleet"
MAX_TOKENS = 16
BLOCK = 8
MODEL = DEMO_MODEL


@dataclass(frozen=True)
class Split:
    """Ranks 0 to `prefill` - 1 of the group prefill, the next `decode` ones decode."""

    transport: str
    prefill: int
    decode: int
    prompt: tuple[int, ...]


def engine_config() -> EngineConfig:
    """Chunks of two blocks."""
    scheduler = SchedulerConfig(
        block_size=BLOCK, max_batch_size=4, chunk_min_tokens=16, chunk_max_tokens=16
    )
    return EngineConfig(
        MODEL, scheduler, dtype="float32", device="cpu", num_blocks=32, attention="torch"
    )


def asked(prompt: tuple[int, ...], **fields: bool) -> Sequence:
    """A greedy request."""
    return sequence_of(prompt, greedy(MAX_TOKENS), BLOCK, **fields)


def run_out(engine: Engine, seen: Callable[[Batch], None] = lambda batch: None) -> None:
    """Steps until nothing is left to do; `seen` before each."""
    while engine.scheduler.has_work:
        batch = engine.plan()
        seen(batch)
        engine.run(batch)


class Side:
    """A rank of one of the engines, with its pool behind a transport."""

    def __init__(self, split: Split, shard: Shard, group: dist.ProcessGroup) -> None:
        self.service = TransferService(
            lambda: create_transport(split.transport, "cpu"), lambda: None
        )
        self.service.start()
        self.ranks = Ranks(shard, group, group)
        self.engine: Engine | None = None
        self.follower: Follower | None = None
        allocate, ranks = self.service.allocate, self.ranks if shard.size > 1 else None
        if shard.rank == 0:
            loaded = load_engine(engine_config(), time.monotonic, allocate, ranks=ranks)
            self.engine, pool = loaded.engine, loaded.pool
        else:
            self.follower, pool = load_follower(engine_config(), self.ranks, allocate)
        self.layout = pool.layout
        memory = PoolMemory(pool.base_address, pool.block_bytes, pool.num_blocks, "cpu")
        descriptor = self.service.register(memory)
        place = (pool.num_blocks, pool.layout)
        agent = self.service.agent
        self.me = describe_shard(SECRET, split.transport, agent, descriptor, place)

    def lead(self, work: Callable[[Engine], None]) -> None:
        """Rank 0 does this with the engine; the others follow."""
        if self.follower is not None:
            self.follower.run()
        else:
            assert self.engine is not None
            work(self.engine)
            self.ranks.announce(None)

    def write_to(self, peer: PeerDescriptor, source: list[int], target: list[int]) -> None:
        """What we have of these blocks for one rank of the other engine."""
        slices = admit_shard(SECRET, self.layout, peer.transport, peer)
        self.service.add_peer(peer.agent, peer.descriptor, peer.num_blocks, [Share(0, 0, slices)])
        note = str(self.layout.tp_rank).encode()
        self.service.write(WriteCommand(peer.agent, peer.agent, source, target, note))
        self.wait_for(1, WriteFinished)

    def wait_for(self, count: int, kind: type) -> list[Any]:
        """So many events of this kind."""
        deadline, found = time.monotonic() + DEADLINE_S, []
        while len(found) < count:
            assert time.monotonic() < deadline, f"{found} and no more"
            found += [event for event in self.service.drain() if isinstance(event, kind)]
        assert not any(getattr(event, "error", None) for event in found)
        return found


def rank_main(conn: Connection, store: str, rank: int, size: int) -> None:
    """Join the group, then play one split after the other, as they come by the pipe."""
    torch.set_num_threads(1)
    patience = timedelta(seconds=DEADLINE_S)
    dist.init_process_group("gloo", f"file://{store}", patience, size, rank)
    spans = [(start, end) for start in range(size) for end in range(start + 1, size + 1)]
    groups = {span: dist.new_group(list(range(*span)), patience) for span in spans}
    while (split := conn.recv()) is not None:
        conn.send(_play(split, rank, groups))
    dist.destroy_process_group()
    os._exit(0)


def _play(split: Split, rank: int, groups: dict[tuple[int, int], Any]) -> list[int]:
    """This rank's part; the leader of the decoding engine returns the output."""
    prefills, first_decode = rank < split.prefill, split.prefill
    span = (0, first_decode) if prefills else (first_decode, first_decode + split.decode)
    if rank >= first_decode + split.decode:
        span = (rank, rank + 1)
    shard = Shard(rank - span[0], span[1] - span[0])
    side = Side(split, shard, groups[span])
    try:
        return _hand_over(split, side, rank)
    finally:
        side.service.close()


def _hand_over(split: Split, side: Side, rank: int) -> list[int]:
    plan: dict[str, Any] = {}
    is_receiver = rank == split.prefill
    sequence = asked(
        split.prompt, prefill_only=rank == 0, remote=is_receiver, source_has_begun=is_receiver
    )

    def prefill(engine: Engine) -> None:
        engine.scheduler.add(sequence)
        tables: list[list[int]] = []
        run_out(engine, lambda batch: tables.append(list(sequence.block_table)))
        plan.update(source=max(tables, key=len), token=sequence.tokens[len(split.prompt)])

    if rank < split.prefill:
        side.lead(prefill)
    if rank == split.prefill:
        assert side.engine is not None
        side.engine.scheduler.add(sequence)
        assert side.engine.plan().received == [sequence]
        plan.update(target=list(sequence.block_table))
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (side.me, plan))
    agreed = {name: value for _, part in everybody for name, value in part.items()}
    peers = [peer for peer, _ in everybody]
    _move(split, side, rank, peers, agreed)
    dist.barrier()

    def decode(engine: Engine) -> None:
        engine.scheduler.arrived(sequence, agreed["token"], time.monotonic())
        run_out(engine)

    if split.prefill <= rank < split.prefill + split.decode:
        side.lead(decode)
    return sequence.tokens[len(split.prompt) :] if rank == split.prefill else []


def _move(
    split: Split, side: Side, rank: int, peers: list[PeerDescriptor], agreed: dict[str, Any]
) -> None:
    """The prompt's blocks, from all ranks of the one engine into those of the other."""

    def shares(peer: PeerDescriptor) -> bool:
        layout = peer.layout
        assert isinstance(layout, KvLayout)
        return bool(shared_heads(side.layout, layout))

    sources, targets = peers[: split.prefill], peers[split.prefill :][: split.decode]
    if rank < split.prefill:
        for peer in filter(shares, targets):
            side.write_to(peer, agreed["source"], agreed["target"])
    elif rank < split.prefill + split.decode:
        expected = [peer.layout.tp_rank for peer in filter(shares, sources) if peer.layout]
        arrived = side.wait_for(len(expected), NotificationArrived)
        assert sorted(int(event.payload) for event in arrived) == expected
