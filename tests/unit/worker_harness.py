"""Both roles of worker without processes, sockets or a model, for tests.

Real are the workers, their host, the reporter, intake, engine, scheduler and block manager, and
both handoff machines. Fake are the clock, the sockets and the transport (`fake_peers`), and the
model (`fake_model`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from decode_worker.prefill_reach import PrefillReach
from decode_worker.resumption import Resumption
from decode_worker.role import DecodeRole
from engine.engine import Engine, EngineLimits
from engine.sampling.grammar import Grammars
from kv_transfer.authentication import authenticate_descriptor
from kv_transfer.handoff.sink import HandoffSink
from kv_transfer.handoff.source import HandoffSource
from kv_transfer.tiers.copies import HostCopies
from kv_transfer.tiers.host_tier import HostTier
from kv_transfer.tiers.kv_tiers import KvTiers
from kv_transfer.tiers.units import Units
from kv_transfer.transfer_loop import NotificationArrived, WriteFinished
from kv_transfer.transports.interface import PoolMemory
from prefill_worker.role import PrefillRole
from process.clock import Clock as ProcessClock
from process.host_load import HostLoad
from process.sockets.control import Peer
from process.wakeup import Wakeup
from protocol.handoff_messages import PeerDescriptor
from protocol.layout import KvLayout
from protocol.message_base import Message
from protocol.messages import Generate, KvPeer, Prefill, Role
from protocol.registration import WorkerState
from scheduling.block_pools import BlockPools
from scheduling.scheduler import Scheduler, SchedulerConfig
from scheduling.step_model import StepModel
from tests.layouts import bare_layout
from tests.paths import DEMO_MODEL
from tests.sequences import greedy
from tests.unit.fake_model import BLOCK, VOCAB, FakeModel, continuation
from tests.unit.fake_peers import FakePeers, FakeServer, FakeTransfers, Write
from tests.unit.fake_worker_parts import CardPool, CountedSteps, PatientHost
from tests.unit.held_thread import HeldThread
from worker.admitting_routers import Admissions
from worker.counters import Count
from worker.host import WorkerParts
from worker.intake import Intake
from worker.loop import WorkerLoop
from worker.reporter import Reporter

TORN = -7
"""What a block holds after a write that was cut off; no token."""
DEMO_TOKENIZER = DEMO_MODEL / "tokenizer.json"
SECRET = "a secret of sixteen"
TTL_S, LANDING_S, MARGIN_S, GRACE_S = 3.0, 1.0, 0.25, 20.0
LAYOUT = bare_layout(BLOCK)
Key = tuple[str, int]
ROUTER = Peer(b"router", "router-1", Role.ROUTER)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Lapsed:
    """A place in the fleet that was lost; `register_again` takes it again."""

    has_lapsed: bool = True
    refusal: str | None = None
    is_asked_to_drain: bool = False

    limits: tuple[int, float] | None = None

    def register_again(self, incarnation: str) -> None:
        self.has_lapsed = False

    def amend(self, chunk_max_tokens: int, itl_target_ms: float) -> None:
        self.limits = (chunk_max_tokens, itl_target_ms)


@dataclass
class Stop:
    """A stop signal by a test's clock; one that came as a signal (`is_final`) stays."""

    clock: Clock
    since: float | None = None
    is_final: bool = False

    def request(self) -> None:
        self.since = self.clock.now if self.since is None else self.since

    def withdraw(self) -> bool:
        if not self.is_final:
            self.since = None
        return not self.is_final


@dataclass
class Bench:
    """One worker's surroundings."""

    name: str
    clock: Clock
    num_blocks: int = 16
    kv_checksum: bool = False
    one_step_ahead: bool = False
    role_name: ClassVar[Role]
    scheduler_fields: dict[str, Any] = field(default_factory=dict)
    host_slots: int = 0  # of a tier below the pool
    layout: KvLayout = LAYOUT  # with several groups, `num_blocks` are large pages

    def __post_init__(self) -> None:
        windows = [each.window for each in self.layout.groups]
        self.memories = self._memories()
        self.memory = self.memories[0]
        fields = {"block_size": BLOCK, "chunk_min_tokens": BLOCK, "chunk_max_tokens": 2 * BLOCK}
        self.scheduler = Scheduler(
            SchedulerConfig(**(fields | self.scheduler_fields)),
            BlockPools.of(self.layout, self.num_blocks),
            StepModel(),
        )
        managers = self.scheduler.pools.managers
        self.model = FakeModel(
            self.memories,
            lambda group, block: managers[group]._pins[block] > 0,
            windows,
            [at for at, each in enumerate(self.layout.groups) if each.state_numbers is not None],
        )
        limits = EngineLimits(VOCAB, managers[0].num_blocks * BLOCK)
        self.engine = Engine(self.scheduler, self.model, self.layout, limits, self.clock)  # type: ignore[arg-type]
        self.engine.run_ahead(int(self.one_step_ahead))
        self.wakeup = Wakeup()
        self.server = FakeServer(self.wakeup.fileno())
        self.transfers = FakeTransfers(f"agent of {self.name}")
        self.published: list[Any] = []
        publisher: Any = SimpleNamespace(publish=self.published.append)
        self.reporter = Reporter(self.engine, publisher, self.name, f"{self.name}-i", 0.1)
        self.reporter.host_load = HostLoad(Path("/nonexistent"), Path("/nonexistent"))
        self.stop: Any = Stop(self.clock)
        self.announced: list[WorkerState] = []
        settings = SimpleNamespace(
            cluster_secret=SECRET,
            drain_grace_s=5.0,
            stall_alarm_s=20.0,
        )
        self.tier_thread = HeldThread()
        parts = WorkerParts(
            engine=self.engine,
            pool=CardPool(self.model, self.memories, self.layout),  # type: ignore[arg-type]
            transfers=self.transfers,  # type: ignore[arg-type]
            server=self.server,  # type: ignore[arg-type]
            reporter=self.reporter,
            intake=Intake(limits, self.layout, Grammars(DEMO_TOKENIZER, VOCAB, ()), "seed", 60.0),
            admissions=Admissions(lambda: ()),
            wakeup=self.wakeup,
            stop=self.stop,
            clock=ProcessClock(self.clock),
            announce=self.announced.append,
            tiers=self.tiers(self.host_slots) if self.host_slots else None,
        )
        self.host = PatientHost(settings, self.name, parts)
        self.sink = HandoffSink(self.transfers.agent, TTL_S, LANDING_S, self.kv_checksum)
        self.peers = FakePeers(self.descriptor)
        self.source = HandoffSource(MARGIN_S, 2, max_fetch_blocks=2, windows=windows)
        self.steps = CountedSteps(self.engine, self.host.counters, self.host.flight)
        self.host.steps = self.steps
        self.as_peer = Peer(self.name.encode(), self.name, self.role_name)  # as sources know it

    def _memories(self) -> list[torch.Tensor]:
        """The pool's memory as blocks of each group: [blocks, layers * BLOCK], or of as many
        numbers as a state has bytes for."""
        layout = self.layout
        whole = torch.full((self.num_blocks, layout.page_bytes // 8), -1, dtype=torch.int64)
        views = []
        for group, each in enumerate(layout.groups):
            size = layout.of_group(group).block_bytes // 8
            tokens = each.state_numbers is None
            views.append(whole.view(-1, size) if tokens else whole[:, :size])
        return views

    def tiers(self, num_slots: int) -> KvTiers:
        """Host memory below the pool, for `num_slots` units."""
        units, memory = Units.of(self.layout), self.memory
        num_units = memory.numel() * memory.element_size() // units.unit_bytes
        pool = PoolMemory(memory.data_ptr(), units.unit_bytes, num_units, "cpu")
        thread: Any = self.tier_thread
        host = HostTier(HostCopies(pool, num_slots), thread, units.unit_bytes, max_age_s=1e6)
        return KvTiers(self.scheduler.pools, units, host)

    @property
    def descriptor(self) -> PeerDescriptor:
        """The descriptor that prefill workers get."""
        agent, descriptor = self.transfers.agent, b"here"
        digest = authenticate_descriptor(SECRET.encode(), agent, descriptor, self.num_blocks)
        return PeerDescriptor(
            transport="fake",
            agent=agent,
            descriptor=descriptor,
            digest=digest,
            num_blocks=self.num_blocks,
            wants_digests=self.kv_checksum,
        )

    def counter(self, name: Count) -> int:
        """A counter's value."""
        return self.reporter.counters[name]

    def take_sent(self) -> list[Message]:
        """What was sent to peers since the last call, without their names."""
        sent = [message for _, message in self.server.sent]
        self.server.sent.clear()
        return sent

    def close(self) -> None:
        """Close the pipe."""
        self.wakeup.close()


class PrefillBench(Bench):
    """A prefill worker."""

    role_name = Role.PREFILL

    def __post_init__(self) -> None:
        super().__post_init__()
        peers: Any = self.peers
        self.role = PrefillRole(self.host, self.source, self.sink, peers)
        self.worker = WorkerLoop(self.host, self.role)
        self.model.is_reading = lambda group, block: any(
            write.group == group and block in write.source_blocks and write.fence.is_done()
            for write in self.transfers.writes
        )


class DecodeBench(Bench):
    """A decode worker."""

    role_name = Role.DECODE

    def __post_init__(self) -> None:
        super().__post_init__()
        peers: Any = self.peers
        self.resumption = Resumption(self.host, GRACE_S)
        self.reach = PrefillReach(
            peers.obstacles,
            peers.retry_closed,
            10.0,
            is_required=False,
            report=lambda lost, text: None,
        )
        self.role = DecodeRole(
            self.host, self.sink, self.source, peers, self.reach, self.resumption
        )
        self.worker = WorkerLoop(self.host, self.role)


def pinned_for_peers(bench: Bench, group: int = 0) -> list[int]:
    """Blocks of no sequence: those that a peer or a tier may still write to, or a peer reads, those
    of prefixes that are taken over, and those put aside for others that are shared."""
    role: Any = bench.role  # type: ignore[attr-defined]
    manager = bench.scheduler.pools.managers[group]
    fenced, served = role._inbound.fenced.blocks[group], role.outbound.served.blocks[group]
    abandoned = bench.host.tiers.blocks_abandoned(group)
    taken = role.caches.taken.blocks(group)
    aside = getattr(manager, "_aside", ()) if group else ()
    return [*fenced, *served, *taken, *abandoned, *aside]


def land(write: Write, source: Bench, target: Bench) -> None:
    """The write is posted, at the earliest, and the data and the notification arrive."""
    write.fence.wait()
    for from_block, to_block in zip(write.source_blocks, write.target_blocks, strict=True):
        target.memories[write.group][to_block] = source.memories[write.group][from_block]
    target.transfers.events.append(NotificationArrived(source.transfers.agent, write.notification))


@dataclass
class LateWrite:
    """A write that its writer was told has failed, and that lands all the same.

    Nothing of its source is read after that (see `WriteDone`): either its data and notification
    had left already (`data`: [blocks, BLOCK], as it was then), or blocks come torn and unannounced.
    """

    due: float
    write: Write
    agent: str
    data: torch.Tensor
    is_whole: bool

    def land(self, target: Bench) -> None:
        """Let what is left of the write arrive."""
        blocks = list(self.write.target_blocks)
        if self.is_whole:
            target.memories[self.write.group][blocks] = self.data
            event = NotificationArrived(self.agent, self.write.notification)
            target.transfers.events.append(event)
        else:
            target.memories[self.write.group][blocks] = TORN


def give_up(write: Write, source: Bench, is_whole: bool) -> LateWrite:
    """What may still land of a write that now fails, nearly as late as it can."""
    write.fence.wait()
    data = source.memories[write.group][list(write.source_blocks)].clone()
    due = source.clock.now + 0.9 * LANDING_S
    return LateWrite(due, write, source.transfers.agent, data, is_whole)


def finish(write: Write, source: Bench) -> None:
    """Let the writer learn that its write has landed."""
    source.transfers.writes.remove(write)
    source.transfers.events.append(WriteFinished(write.key, None, 1, 2))


@dataclass
class Asked:
    """One attempt, as its router sees it."""

    prompt: list[int]
    num_output: int
    max_tokens: int
    peer: KvPeer | None
    is_given_up: bool = False
    was_cut_off: bool = False  # perhaps before its messages arrived
    tokens: dict[int, int] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)  # by worker

    def legs(self, key: Key) -> list[Generate | Prefill]:
        """The messages that the router of the attempt sends."""
        fields: dict[str, Any] = {
            "request_id": key[0],
            "attempt": key[1],
            "token_ids": self.prompt + continuation(self.prompt, self.num_output),
            "num_output": self.num_output,
            "sampling": greedy(self.max_tokens),
            "deadline_ms": 60_000,
        }
        if self.peer is None:
            return [Generate(**fields)]
        return [Generate(**fields, prefill=self.peer), Prefill(**fields)]
