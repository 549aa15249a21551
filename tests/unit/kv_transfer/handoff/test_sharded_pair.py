"""Sharded workers' ranks against each other, over a network that loses and reorders, with writes
that fail and land late, and source ranks that die."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kv_transfer.handoff import actions
from kv_transfer.handoff.key import HandoffKey
from kv_transfer.handoff.sharded_receiver import ShardedReceiver, VerifyLane
from kv_transfer.handoff.sharded_sender import ForLane, ShardedSender
from kv_transfer.handoff.sink import HandoffSink
from kv_transfer.handoff.source import HandoffSource
from protocol.messages import Abort, KvAsk, KvBegun, KvClosed, KvGrant, KvRenew
from tests.effort import times

TTL_S = 3.0
LANDING_S = 2.0
NUM_BLOCKS = 10
SOURCES = 2
TARGETS = 2


@dataclass
class Prompt:
    """What a source rank computes for one handoff."""

    num_blocks: int
    num_ready: int = 0
    is_open: bool = False
    has_begun: bool = False
    is_finished: bool = False


@dataclass
class Source:
    """One incarnation of a source rank."""

    rank: int
    name: str
    sender: ShardedSender = field(
        default_factory=lambda: ShardedSender(lambda: HandoffSource(0.5, max_write_blocks=2))
    )
    prompts: dict[HandoffKey, Prompt] = field(default_factory=dict)
    pinned: set[HandoffKey] = field(default_factory=set)
    flying: dict[tuple[int, int], actions.PostWrite] = field(default_factory=dict)
    landed: dict[tuple[int, int], actions.PostWrite] = field(default_factory=dict)


@dataclass
class Wanted:
    """What a target rank knows of one handoff."""

    first_block: int
    num_blocks: int
    block_ids: tuple[int, ...] = ()
    is_begun: bool = False
    is_granted: bool = False
    is_aborted: bool = False
    outcome: str = ""
    is_fenced: bool = False


class Target:
    """A target rank, and what its memory holds: per block and source rank what landed last."""

    def __init__(self, rank: int, checksum: bool) -> None:
        agent = f"target {rank}"
        self.receiver = ShardedReceiver(lambda: HandoffSink(agent, TTL_S, LANDING_S, checksum))
        self.wanted: dict[HandoffKey, Wanted] = {}
        self.free = set(range(NUM_BLOCKS))
        self.memory: dict[tuple[int, int], tuple[HandoffKey, int]] = {}
        self.to_verify: list[tuple[HandoffKey, int]] = []


class ShardedPair(RuleBasedStateMachine):
    """Every source rank shares heads with every target rank."""

    @initialize(checksum=st.booleans())
    def begin(self, checksum: bool) -> None:
        self.now, self.checksum = 100.0, checksum
        self.incarnations, self.requests = count(), count()
        self.sources = [self.born(rank) for rank in range(SOURCES)]
        self.targets = [Target(rank, checksum) for rank in range(TARGETS)]
        self.network: list[tuple[Any, int, Any]] = []  # to whom, from which rank, what
        self.ghosts: list[tuple[float, int, int, actions.PostWrite]] = []
        self.dead: list[str] = []

    def born(self, rank: int) -> Source:
        return Source(rank, f"source {rank}.{next(self.incarnations)}")

    # -- what the machines ask for -------------------------------------------------------

    def at_source(self, source: Source, asked_for: list[Any]) -> None:
        for action in asked_for:
            match action:
                case ForLane(target, actions.PostWrite(write_id=write_id) as write):
                    assert self.targets[target].wanted[write.key].is_fenced
                    assert write.key in source.pinned
                    source.flying[target, write_id] = write
                case ForLane(target, actions.SendBegun(key=key)):
                    assert source.prompts[key].has_begun
                    begun = KvBegun(request_id=key.request_id, attempt=key.attempt)
                    self.network.append((self.targets[target], source.rank, begun))
                case ForLane(target, actions.Close(key=key, error=error)):
                    assert not [w for w in self.under_way(source, target) if w.key == key]
                    closed = KvClosed(request_id=key.request_id, attempt=key.attempt, error=error)
                    self.network.append((self.targets[target], source.rank, closed))
                case actions.Release(key=key):
                    source.pinned.remove(key)
                    for target in range(TARGETS):
                        assert not [w for w in self.under_way(source, target) if w.key == key]

    def under_way(self, source: Source, target: int) -> list[actions.PostWrite]:
        writes = [*source.flying.items(), *source.landed.items()]
        return [write for (to, _), write in writes if to == target]

    def at_target(self, rank: int, asked_for: list[Any]) -> None:
        target = self.targets[rank]
        for action in asked_for:
            match action:
                case (
                    actions.SendAsk(peer, message)
                    | actions.SendGrant(peer, message)
                    | actions.SendRenew(peer, message)
                ):
                    self.send_to_source(peer, rank, message)
                case actions.SendAbort(key, peer):
                    message = Abort(request_id=key.request_id, attempt=key.attempt)
                    self.send_to_source(peer, rank, message)
                case actions.Begun(key):
                    assert not target.wanted[key].is_begun
                    target.wanted[key].is_begun = True
                case VerifyLane(source, verify):
                    assert verify.blocks == target.wanted[verify.key].block_ids
                    target.to_verify.append((verify.key, source))
                case actions.Complete(key):
                    wanted = self.settle(target, key, "complete")
                    end = wanted.first_block + len(wanted.block_ids)
                    self.check_arrived(target, key, range(wanted.first_block, end))
                case actions.Failed(key, _, arrived):
                    self.settle(target, key, "failed")
                    self.check_arrived(target, key, arrived)
                case actions.Unfence(key, block_ids):
                    self.unfence(rank, key, block_ids)

    def send_to_source(self, peer: str, target: int, message: Any) -> None:
        self.network += [
            (source, target, message) for source in self.sources if source.name == peer
        ]

    def settle(self, target: Target, key: HandoffKey, outcome: str) -> Wanted:
        wanted = target.wanted[key]
        assert wanted.outcome == ""
        assert not wanted.is_aborted
        wanted.outcome = outcome
        return wanted

    def check_arrived(self, target: Target, key: HandoffKey, indices: Any) -> None:
        wanted = target.wanted[key]
        for index in indices:
            block = wanted.block_ids[index - wanted.first_block]
            assert all(target.memory[block, rank] == (key, index) for rank in range(SOURCES))

    def unfence(self, rank: int, key: HandoffKey, block_ids: tuple[int, ...]) -> None:
        target = self.targets[rank]
        wanted = target.wanted[key]
        assert wanted.is_fenced
        assert block_ids == wanted.block_ids
        wanted.is_fenced = False
        may_land = [write for _, _, to, write in self.ghosts if to == rank]
        for source in self.sources:
            may_land += [write for (to, _), write in source.flying.items() if to == rank]
        assert not {block for write in may_land for block in write.target_blocks} & {*block_ids}
        target.free |= {*block_ids}

    def land(self, source: int, target: int, write: actions.PostWrite) -> None:
        for i, block in enumerate(write.target_blocks):
            assert block not in self.targets[target].free, "landed in a block that was given back"
            self.targets[target].memory[block, source] = (write.key, write.first_block + i)

    # -- requests ------------------------------------------------------------------------

    @rule(num_blocks=st.integers(0, 4), first_block=st.integers(0, 2), open_now=st.booleans())
    def request(self, num_blocks: int, first_block: int, open_now: bool) -> None:
        first_block = min(first_block, num_blocks)
        if len(self.sources[0].prompts) > 12:
            return
        key = HandoffKey(f"r{next(self.requests)}", 1)
        for source in self.sources:
            source.prompts[key] = Prompt(num_blocks)
            if open_now:
                self.open(source, key)
        for rank, target in enumerate(self.targets):
            target.wanted[key] = Wanted(first_block, num_blocks)
            peers = {source.rank: source.name for source in self.sources}
            self.at_target(rank, target.receiver.ask(key, peers, self.now))

    @rule(rank=st.integers(0, TARGETS - 1), data=st.data())
    def grant(self, rank: int, data: st.DataObject) -> None:
        waiting = [key for key, wanted in self.targets[rank].wanted.items() if may_grant(wanted)]
        if waiting:
            self.try_grant(rank, data.draw(st.sampled_from(waiting)))

    def try_grant(self, rank: int, key: HandoffKey) -> None:
        target = self.targets[rank]
        wanted = target.wanted[key]
        missing = wanted.num_blocks - wanted.first_block
        if missing <= len(target.free):
            wanted.block_ids = tuple(sorted(target.free)[:missing])
            target.free -= {*wanted.block_ids}
            wanted.is_granted = wanted.is_fenced = True
            offered = target.receiver.offer(key, wanted.first_block, wanted.block_ids, self.now)
            self.at_target(rank, offered)

    def open(self, source: Source, key: HandoffKey) -> None:
        source.pinned.add(key)
        prompt, targets, deadline = source.prompts[key], range(TARGETS), self.now + 5.0
        prompt.is_open = True
        opened = source.sender.open(key, targets, prompt.num_blocks, self.now, deadline)
        self.at_source(source, opened)

    @rule(rank=st.integers(0, SOURCES - 1), size=st.integers(1, 3), data=st.data())
    def chunk(self, rank: int, size: int, data: st.DataObject) -> None:
        source = self.sources[rank]
        if source.prompts:
            self.compute(source, data.draw(st.sampled_from(sorted(source.prompts))), size)

    def compute(self, source: Source, key: HandoffKey, size: int) -> None:
        prompt = source.prompts[key]
        if not prompt.is_open:
            self.open(source, key)
        if not prompt.has_begun:
            prompt.has_begun = True
            self.at_source(source, source.sender.begin(key, self.now))
        if key not in source.pinned or prompt.is_finished:
            return
        first, prompt.num_ready = prompt.num_ready, min(prompt.num_ready + size, prompt.num_blocks)
        blocks = range(first, prompt.num_ready)
        self.at_source(source, source.sender.blocks_ready(key, first, blocks, 0, self.now))
        if prompt.num_ready == prompt.num_blocks and key in source.pinned:
            prompt.is_finished = True
            self.at_source(source, source.sender.finish(key, self.now))

    @rule(rank=st.integers(0, TARGETS - 1), data=st.data())
    def give_up(self, rank: int, data: st.DataObject) -> None:
        target = self.targets[rank]
        live = [k for k, w in target.wanted.items() if not w.outcome and not w.is_aborted]
        if live:
            self.abort(rank, data.draw(st.sampled_from(live)))

    def abort(self, rank: int, key: HandoffKey) -> None:
        target = self.targets[rank]
        target.wanted[key].is_aborted = True
        self.at_target(rank, target.receiver.abort(key))

    @rule(rank=st.integers(0, TARGETS - 1), ok=st.sampled_from([True, True, False]))
    def verify(self, rank: int, ok: bool) -> None:
        target = self.targets[rank]
        if target.to_verify:
            key, source = target.to_verify.pop(0)
            self.at_target(rank, target.receiver.verified(key, source, ok))

    # -- network and transport -------------------------------------------------------------

    @rule(data=st.data(), is_lost=st.sampled_from([False, False, False, True]))
    def message(self, data: st.DataObject, is_lost: bool) -> None:
        if self.network:
            at = data.draw(st.integers(0, len(self.network) - 1))
            message = self.network.pop(at)
            if not is_lost:
                self.deliver(*message)

    @rule()
    def network_catches_up(self) -> None:
        while self.network:
            self.deliver(*self.network.pop(0))

    def deliver(self, to: Source | Target, rank: int, message: Any) -> None:
        if isinstance(to, Target):
            at = self.targets.index(to)
            if isinstance(message, KvBegun):
                self.at_target(at, to.receiver.begun(rank, message))
            elif isinstance(message, KvClosed):
                self.at_target(at, to.receiver.closed(rank, message, self.now))
            else:
                self.at_target(at, to.receiver.written(message.tp_rank, message))
        elif to in self.sources:
            agent = f"target {rank}"
            match message:
                case KvAsk():
                    self.at_source(to, to.sender.ask(rank, message, self.now))
                case KvGrant():
                    self.at_source(to, to.sender.grant(rank, message, self.now))
                case KvRenew():
                    self.at_source(to, to.sender.renew(rank, message, agent, self.now))
                case Abort():
                    key = HandoffKey(message.request_id, message.attempt)
                    self.at_source(to, to.sender.give_up(rank, key, agent))

    @rule(rank=st.integers(0, SOURCES - 1), data=st.data())
    def write_lands(self, rank: int, data: st.DataObject) -> None:
        source = self.sources[rank]
        if source.flying:
            self.land_flying(source, data.draw(st.sampled_from(sorted(source.flying))))

    def land_flying(self, source: Source, lane: tuple[int, int]) -> None:
        write = source.landed[lane] = source.flying.pop(lane)
        self.land(source.rank, lane[0], write)
        digests = [b"d"] * len(write.target_blocks) if self.checksum else []
        note = write.notification(digests, source.rank)
        self.network.append((self.targets[lane[0]], source.rank, note))

    @rule(rank=st.integers(0, SOURCES - 1))
    def writes_complete(self, rank: int) -> None:
        source = self.sources[rank]
        while source.landed:
            lane, _ = source.landed.popitem()
            self.at_source(source, source.sender.write_finished(*lane, None))

    @rule(rank=st.integers(0, SOURCES - 1), data=st.data())
    def write_fails(self, rank: int, data: st.DataObject) -> None:
        source = self.sources[rank]
        if source.flying:
            lane = data.draw(st.sampled_from(sorted(source.flying)))
            write = source.flying.pop(lane)
            self.ghosts.append((self.now + LANDING_S, rank, lane[0], write))
            self.at_source(source, source.sender.write_finished(*lane, "the transport failed"))

    @rule(data=st.data())
    def ghost_lands(self, data: st.DataObject) -> None:
        if self.ghosts:
            at = data.draw(st.integers(0, len(self.ghosts) - 1))
            self.land(*self.ghosts.pop(at)[1:])

    # -- time and death ----------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.1, 0.3, 1.0, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.ghosts = [ghost for ghost in self.ghosts if ghost[0] > self.now]
        for source in self.sources:
            self.at_source(source, source.sender.sweep(self.now))
        for rank, target in enumerate(self.targets):
            self.at_target(rank, target.receiver.sweep(self.now))

    @rule(rank=st.integers(0, SOURCES - 1))
    def source_dies(self, rank: int) -> None:
        source = self.sources[rank]
        for (target, _), write in source.flying.items():
            self.ghosts.append((self.now + LANDING_S, rank, target, write))
        self.dead.append(source.name)
        self.sources[rank] = self.born(rank)

    @rule()
    def deaths_are_noticed(self) -> None:
        while self.dead:
            name = self.dead.pop()
            for rank, target in enumerate(self.targets):
                self.at_target(rank, target.receiver.agent_gone(name, self.now))

    @invariant()
    def fences_are_consistent(self) -> None:
        for target in getattr(self, "targets", ()):
            fenced = [block for w in target.wanted.values() if w.is_fenced for block in w.block_ids]
            assert len(fenced) == len(set(fenced)) == target.receiver.num_fenced_blocks
            assert len(target.free) + len(fenced) == NUM_BLOCKS

    def settle_target(self, rank: int, is_late: bool) -> None:
        target = self.targets[rank]
        while target.to_verify:
            self.verify(rank, True)
        for key, wanted in target.wanted.items():
            if may_grant(wanted):
                self.try_grant(rank, key)
            if is_late and not wanted.outcome and not wanted.is_aborted:
                self.abort(rank, key)

    def teardown(self) -> None:
        """With messages delivered and everybody's deadlines kept, everything ends."""
        if not hasattr(self, "targets"):
            return
        for step in range(14):
            self.deaths_are_noticed()
            for source in self.sources:
                for key in source.prompts:
                    self.compute(source, key, 9)
                for lane in sorted(source.flying):
                    self.land_flying(source, lane)
                self.writes_complete(source.rank)
            self.network_catches_up()
            for rank in range(TARGETS):
                self.settle_target(rank, is_late=step == 8)
            self.time_passes(TTL_S / 3)
        for source in self.sources:
            assert source.sender.num_open == source.sender.num_outstanding == 0
            assert not source.pinned
        for target in self.targets:
            assert target.receiver.num_open == 0
            assert target.free == set(range(NUM_BLOCKS))
            assert all(w.outcome or w.is_aborted for w in target.wanted.values())


def may_grant(wanted: Wanted) -> bool:
    """Whether all sources have begun and the target rank still wants the blocks."""
    is_over = wanted.is_granted or wanted.is_aborted or bool(wanted.outcome)
    return wanted.is_begun and not is_over


TestShardedPair = ShardedPair.TestCase
TestShardedPair.settings = settings(
    max_examples=times(60, 150), stateful_step_count=60, deadline=None, derandomize=True
)
