"""Both roles of worker without processes, sockets or a model, for tests.

Real are the workers, their host, the reporter, intake, engine, scheduler and block manager, and
both handoff machines. Fake are the clock, the sockets, the transport and the model: the model
writes what it computes into the pool's memory and chooses tokens by what it reads there, so that
a block with wrong contents gives wrong tokens.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from decode_worker.resumption import Resumption
from decode_worker.worker import DecodeWorker
from engine.batch import Batch
from engine.block_manager import BlockManager
from engine.choices import SampledToken
from engine.device import PASSED, Fence
from engine.engine import Engine, EngineLimits
from engine.grammar import Grammars
from engine.prompt_record import PromptRecord, PromptRows
from engine.runner import NOT_FINITE, RowFailure
from engine.scheduler import Scheduler, SchedulerConfig
from engine.sequence import Sequence
from engine.step_model import StepModel
from kv_transfer.authentication import authenticate_descriptor
from kv_transfer.receiver import HandoffReceiver
from kv_transfer.sender import HandoffSender
from kv_transfer.transfer_loop import (
    NotificationArrived,
    PeerAdded,
    TransferEvent,
    WriteCommand,
    WriteFinished,
)
from prefill_worker.worker import PrefillWorker
from protocol.layout import KvLayout
from protocol.messages import Generate, Message, PeerDescriptor, Prefill, PrefillPeer, Role
from protocol.registration import WorkerState
from protocol.sampling import PromptLogprobs
from runtime.control import Peer
from runtime.counters import Count
from runtime.intake import Intake
from runtime.reporter import Reporter
from runtime.wakeup import Wakeup
from runtime.worker_host import WorkerHost, WorkerParts
from tests.sequences import greedy

BLOCK = 4
VOCAB = 50
TORN = -7
"""What a block holds after a write that was cut off; no token."""
DEMO_TOKENIZER = Path(__file__).parents[2] / "demo_model" / "tokenizer.json"
SECRET = "a secret of sixteen"
TTL_S, LANDING_S, MARGIN_S, GRACE_S = 3.0, 1.0, 0.25, 20.0
LAYOUT = KvLayout(
    model_fingerprint="m",
    dtype="float32",
    num_layers=1,
    num_kv_heads=1,
    block_size=BLOCK,
    head_dim=1,
)
Key = tuple[str, int]
ROUTER = Peer(b"router", "router-1", Role.ROUTER)


def next_token(context: Seq[int]) -> int:
    """What the fake model continues a text with."""
    return zlib.crc32(repr(list(context)).encode()) % VOCAB


def continuation(prompt: Seq[int], num_tokens: int) -> list[int]:
    """The output that every path must give."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class LateStep:
    """A step that was launched ahead: what it was given, and tokens once it is computed. Is its
    own fence."""

    model: FakeModel
    spans: list[tuple[Sequence, list[int], int, list[int] | LateStep]]  # blocks, start, tokens
    sampled: dict[Sequence, int]  # contexts
    tokens: dict[Sequence, int] = field(default_factory=dict)
    has_passed: bool = False

    @property
    def fence(self) -> LateStep:
        return self

    def is_done(self) -> bool:
        return self.has_passed

    def wait(self) -> None:
        while not self.has_passed:
            self.model.late.popleft().compute()

    def read(self) -> list[SampledToken | RowFailure]:
        self.model.strike("late")
        self.wait()
        broken = self.model.broken
        return [
            NOT_FINITE if s.request_id in broken else SampledToken(self.tokens[s])
            for s in self.sampled
        ]

    def compute(self) -> None:
        for sequence, blocks, start, tokens in self.spans:
            if isinstance(tokens, LateStep):
                tokens = [tokens.tokens[sequence]]
            self.model.write(blocks, start, tokens)
        for sequence, length in self.sampled.items():
            blocks = next(blocks for s, blocks, _, _ in self.spans if s is sequence)
            self.tokens[sequence] = self.model.choose(blocks, length)
        self.has_passed = True


class FakeModel:
    """A runner over a pool [num_blocks, BLOCK] of token ids. `broken` names requests whose logits
    are not finite; `explodes` makes the next step raise, at its launch or when what was launched
    ahead is read ("late"); `fence` stands behind every step. Steps that are launched ahead are
    computed as late as a card could; `strays` are blocks that were written to but not `is_owned`
    (an error would be taken for the step's own)."""

    def __init__(self, memory: torch.Tensor, is_owned: Callable[[int], bool]) -> None:
        self._memory = memory
        self._is_owned = is_owned
        self.broken: set[str] = set()
        self.explodes: str | None = None
        self.fence: Fence = PASSED
        self.late: deque[LateStep] = deque()
        self.strays: list[int] = []
        self.num_promised = 0  # tokens that were computed before anybody knew them

    def strike(self, when: str) -> None:
        """Raise, if that was asked for."""
        if self.explodes == when:
            self.explodes = None
            raise RuntimeError("the device is on fire")

    def write(self, blocks: Seq[int], start: int, tokens: Seq[int]) -> None:
        """Store tokens at positions from `start` on."""
        for position, token in enumerate(tokens, start):
            block = blocks[position // BLOCK]
            if not self._is_owned(block):
                self.strays.append(block)
            self._memory[block, position % BLOCK] = token

    def choose(self, blocks: Seq[int], length: int) -> int:
        """The token that follows `length` stored ones."""
        return next_token(self._memory[list(blocks)].flatten()[:length].tolist())

    def launch_ahead(self, batch: Batch, before: LateStep | None) -> LateStep:
        self.strike("launch")
        spans: list[tuple[Sequence, list[int], int, list[int] | LateStep]] = []
        ends: dict[Sequence, int] = {}
        starts = [(s, s.num_launched, 1) for s in batch.decodes]
        starts += [(c.sequence, c.start, c.num_tokens) for c in batch.chunks]
        for sequence, start, size in starts:
            tokens: list[int] | LateStep = sequence.tokens[start : start + size]
            if not tokens:
                assert before is not None
                tokens = before
                self.num_promised += 1
            spans.append((sequence, list(sequence.block_table), start, tokens))
            ends[sequence] = start + size
        self.late.append(LateStep(self, spans, {s: ends[s] for s in batch.sampled}))
        return self.late[-1]

    def wait(self) -> None:
        while self.late:
            self.late.popleft().compute()

    def launch(self, batch: Batch) -> tuple[torch.Tensor, Fence]:
        self.strike("launch")
        self.wait()
        spans = [(s, s.num_computed, 1) for s in batch.decodes]
        spans += [(c.sequence, c.start, c.num_tokens) for c in batch.chunks]
        for sequence, start, size in spans:
            self.write(sequence.block_table, start, sequence.tokens[start : start + size])
            if sequence.needs_prompt_logits:
                _record(sequence, start, size)
        return torch.empty(0), self.fence

    def sample(self, batch: Batch, logits: torch.Tensor) -> list[SampledToken | RowFailure]:
        rows: list[SampledToken | RowFailure] = []
        for sequence in batch.sampled:
            token = SampledToken(self.choose(sequence.block_table, sequence.num_tokens))
            rows.append(NOT_FINITE if sequence.request_id in self.broken else token)
        return rows


def _record(sequence: Sequence, start: int, size: int) -> None:
    """Tell of each token of the prompt that its rank is its number, and nothing else."""
    if sequence.prompt_record is None:
        sequence.prompt_record = PromptRecord(0)
    followers = sequence.tokens[start + 1 : start + 1 + size]
    ranks = b"".join(each.to_bytes(4, "little") for each in followers)
    sequence.prompt_record.put(start, PromptRows(bytes(len(ranks)), ranks, b"", b""))


def ranks_told(told: PromptLogprobs | None) -> list[int] | None:
    """What `FakeModel` told of a prompt."""
    return None if told is None else [each.rank for each in told.entries()]


class FakeServer:
    """A control server: a test puts messages in, and reads what was sent."""

    def __init__(self, fileno: int) -> None:
        self.socket = fileno
        self.refused: dict[str, int] = {}
        self.num_turned_away = 0
        self.inbox: list[tuple[Peer, Any]] = []
        self.sent: list[tuple[Peer, Message]] = []
        self.gone: list[Peer] = []
        self.peers: list[Peer] = []  # who is connected, as far as a worker asks for that
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

    def reincarnate(self, incarnation: str) -> None:
        self.incarnations.append(incarnation)


@dataclass
class Lapsed:
    """A place in the fleet that was lost; `register_anew` takes it again."""

    has_lapsed: bool = True
    is_replaced: bool = False
    is_asked_to_drain: bool = False

    def register_anew(self, incarnation: str) -> None:
        self.has_lapsed = False


@dataclass
class Write:
    """A write that was posted and has not finished."""

    key: int
    agent: str
    source_blocks: tuple[int, ...]
    target_blocks: tuple[int, ...]
    notification: bytes


class FakeTransfers:
    """A transfer service: a test lets writes land or fail."""

    transport_name = "fake"

    def __init__(self, agent: str) -> None:
        self.agent = agent
        self.peers: set[str] = set()
        self.writes: list[Write] = []
        self.fences: list[Any] = []  # of all writes so far
        self.events: list[TransferEvent] = []

    def add_peer(self, agent: str, descriptor: bytes, num_blocks: int) -> None:
        self.peers.add(agent)
        self.events.append(PeerAdded(agent))

    def remove_peer(self, agent: str) -> None:
        self.peers.discard(agent)
        for write in [write for write in self.writes if write.agent == agent]:
            self.fail(write, "the peer was removed")

    def write(self, command: WriteCommand) -> None:
        assert isinstance(command.key, int)
        source, target = tuple(command.source_blocks), tuple(command.target_blocks)
        write = Write(command.key, command.agent, source, target, command.notification)
        self.writes.append(write)
        self.fences.append(command.computed)
        if command.agent not in self.peers:
            self.fail(write, "the peer is not known")

    def fail(self, write: Write, reason: str) -> None:
        self.writes.remove(write)
        self.events.append(WriteFinished(write.key, reason, 1, 2))

    def expect(self, data: bool) -> None:
        pass

    def drain(self) -> list[TransferEvent]:
        events, self.events = self.events, []
        return events


class FakePeers:
    """A decode worker's links to prefill workers: a test carries the messages."""

    def __init__(self) -> None:
        self.refused = 0
        self.connected: list[str] = []
        self.sent: list[tuple[str, Message]] = []
        self.inbox: list[tuple[str, Any]] = []
        self.dead: list[str] = []
        self.forgotten: list[str] = []
        self.mute: list[str] = []

    def meet(self, now: float) -> None:
        pass

    def connect(self, peer: PrefillPeer) -> None:
        if peer.incarnation not in self.connected:
            self.connected.append(peer.incarnation)

    def send(self, incarnation: str, message: Message) -> None:
        self.sent.append((incarnation, message))

    def receive(self) -> list[tuple[str, Any]]:
        inbox, self.inbox = self.inbox, []
        return inbox

    def gone(self, now: float) -> list[str]:
        dead, self.dead = self.dead, []
        return dead

    def reset(self) -> list[str]:
        forgotten, self.forgotten = self.forgotten, []
        return forgotten

    def silent(self, now: float) -> list[str]:
        return self.mute


class PatientHost(WorkerHost):
    """A host with a test's clock, which waits for nothing."""

    def __init__(self, clock: Clock, settings: Any, worker_id: str, parts: WorkerParts) -> None:
        super().__init__(settings, worker_id, parts)
        self._clock = clock

    def wait(self) -> None:
        self._wakeup.clear()

    def now(self) -> float:
        return self._clock.now


@dataclass
class Bench:
    """One worker's surroundings."""

    name: str
    clock: Clock
    num_blocks: int = 16
    kv_checksum: bool = False
    one_step_ahead: bool = False
    scheduler_fields: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.memory = torch.full((self.num_blocks, BLOCK), -1, dtype=torch.int64)
        fields = {"block_size": BLOCK, "chunk_min_tokens": BLOCK, "chunk_max_tokens": 2 * BLOCK}
        self.scheduler = Scheduler(
            SchedulerConfig(**(fields | self.scheduler_fields)),
            BlockManager(self.num_blocks),
            StepModel(),
        )
        self.model = FakeModel(self.memory, lambda block: self.scheduler.blocks._pins[block] > 0)
        limits = EngineLimits(VOCAB, self.num_blocks * BLOCK)
        self.engine = Engine(self.scheduler, self.model, LAYOUT, limits, self.clock)  # type: ignore[arg-type]
        self.engine.one_step_ahead = self.one_step_ahead
        self.wakeup = Wakeup()
        self.server = FakeServer(self.wakeup.fileno())
        self.transfers = FakeTransfers(f"agent of {self.name}")
        self.published: list[Any] = []
        publisher: Any = SimpleNamespace(publish=self.published.append)
        self.reporter = Reporter(self.engine, publisher, self.name, f"{self.name}-i", 0.1)
        self.stop: Any = SimpleNamespace(since=None)
        self.announced: list[WorkerState] = []
        settings = SimpleNamespace(
            cluster_secret=SECRET, kv_checksum=self.kv_checksum, drain_grace_s=5.0
        )
        parts = WorkerParts(
            engine=self.engine,
            pool=SimpleNamespace(tensor=self.memory),  # type: ignore[arg-type]
            transfers=self.transfers,  # type: ignore[arg-type]
            server=self.server,  # type: ignore[arg-type]
            reporter=self.reporter,
            intake=Intake(limits, LAYOUT, Grammars(DEMO_TOKENIZER, VOCAB, ()), "seed", 60.0),
            wakeup=self.wakeup,
            stop=self.stop,
            announce=self.announced.append,
        )
        self.host = PatientHost(self.clock, settings, self.name, parts)

    def counter(self, name: Count) -> int:
        """A counter's value."""
        return self.reporter.counters[name]

    def take_sent(self) -> list[Message]:
        """What was sent to peers since the last call, without their names."""
        sent = [message for _, message in self.server.sent]
        self.server.sent.clear()
        return sent

    def close(self) -> None:
        """Let go of the pipe."""
        self.wakeup.close()


class PrefillBench(Bench):
    """A prefill worker."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sender = HandoffSender(MARGIN_S, max_write_blocks=2)
        self.worker = PrefillWorker(self.host, self.sender)


class DecodeBench(Bench):
    """A decode worker."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.receiver = HandoffReceiver(self.transfers.agent, TTL_S, LANDING_S, self.kv_checksum)
        self.peers = FakePeers()
        self.sender = HandoffSender(MARGIN_S, max_write_blocks=2)
        peers: Any = self.peers
        self.resumption = Resumption(self.host, GRACE_S)
        self.worker = DecodeWorker(self.host, self.receiver, self.sender, peers, self.resumption)
        self.as_peer = Peer(self.name.encode(), self.name, Role.DECODE)

    @property
    def descriptor(self) -> PeerDescriptor:
        """What prefill workers get to know."""
        agent, descriptor = self.transfers.agent, b"here"
        digest = authenticate_descriptor(SECRET.encode(), agent, descriptor, self.num_blocks)
        return PeerDescriptor(
            transport="fake",
            agent=agent,
            descriptor=descriptor,
            digest=digest,
            num_blocks=self.num_blocks,
        )


def land(write: Write, source: Bench, target: DecodeBench) -> None:
    """The data and the notification arrive."""
    for from_block, to_block in zip(write.source_blocks, write.target_blocks, strict=True):
        target.memory[to_block] = source.memory[from_block]
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

    def land(self, target: DecodeBench) -> None:
        """What is left of it arrives."""
        blocks = list(self.write.target_blocks)
        if self.is_whole:
            target.memory[blocks] = self.data
            event = NotificationArrived(self.agent, self.write.notification)
            target.transfers.events.append(event)
        else:
            target.memory[blocks] = TORN


def give_up(write: Write, source: Bench, is_whole: bool) -> LateWrite:
    """What may still land of a write that now fails, nearly as late as it can."""
    data = source.memory[list(write.source_blocks)].clone()
    due = source.clock.now + 0.9 * LANDING_S
    return LateWrite(due, write, source.transfers.agent, data, is_whole)


def finish(write: Write, source: Bench) -> None:
    """The writer learns that its write has landed."""
    source.transfers.writes.remove(write)
    source.transfers.events.append(WriteFinished(write.key, None, 1, 2))


@dataclass
class Asked:
    """One attempt, as its router sees it."""

    prompt: list[int]
    num_output: int
    max_tokens: int
    peer: PrefillPeer | None
    is_given_up: bool = False
    was_cut_off: bool = False  # perhaps before its messages arrived
    tokens: dict[int, int] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)  # by worker

    def legs(self, key: Key) -> list[Generate | Prefill]:
        """What its router sends."""
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
