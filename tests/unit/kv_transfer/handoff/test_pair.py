"""Both sides of a handoff against each other, over a network that loses and reorders, with a
transport whose failed writes may still land, and prefill workers that die. The layout has up to
three groups of layers; of those with a window, a prompt's first blocks are not kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_transfer.handoff import actions
from kv_transfer.handoff.key import HandoffKey, key_of
from kv_transfer.handoff.sink import HandoffSink
from kv_transfer.handoff.source import HandoffSource
from protocol.handoff_messages import (
    GroupBlocks,
    KvAsk,
    KvBegun,
    KvClosed,
    KvGrant,
    KvRenew,
    KvWritten,
)
from tests.effort import times

TTL_S = 3.0
LANDING_S = 2.0
GRANT_WAIT_S = 5.0
NUM_BLOCKS = 12
D_AGENT = "decode"
LAYOUTS = [(None,), (2,), (None, 2), (None, 1, 3)]
"""The windows of each group, in blocks."""


@dataclass(frozen=True)
class AbortMessage:
    """Stands for protocol.Abort from the decode worker."""

    key: HandoffKey


ToPrefiller = KvAsk | KvGrant | KvRenew | AbortMessage
ToDecoder = KvBegun | KvClosed | KvWritten


@dataclass
class Prompt:
    """What the prefill worker computes for one handoff."""

    num_blocks: int
    is_open: bool = False
    has_begun: bool = False
    num_ready: int = 0
    is_computed: bool = False
    is_released: bool = False


@dataclass
class Prefiller:
    """One incarnation of a prefill worker."""

    name: str
    source: HandoffSource
    prompts: dict[HandoffKey, Prompt] = field(default_factory=dict)
    flying: dict[int, actions.PostWrite] = field(default_factory=dict)  # posted, not landed
    landed: dict[int, actions.PostWrite] = field(default_factory=dict)  # P has not seen it yet
    inbox: list[ToPrefiller] = field(default_factory=list)


@dataclass
class Wanted:
    """What the decode worker knows of one handoff."""

    peer: str
    first_blocks: list[int]  # by group
    num_blocks: int
    groups: list[tuple[int, ...]] = field(default_factory=list)  # granted blocks
    is_begun: bool = False  # the decode worker was told
    is_granted: bool = False
    is_aborted: bool = False
    outcome: str = ""
    is_fenced: bool = False


class HandoffPair(RuleBasedStateMachine):
    """Checks on every landing that the block is fenced for it, and on every end that all ended."""

    @initialize(
        checksum=st.booleans(), max_write_blocks=st.integers(1, 4), windows=st.sampled_from(LAYOUTS)
    )
    def begin(self, checksum: bool, max_write_blocks: int, windows: tuple[int | None, ...]) -> None:
        self.now = 100.0
        self.checksum = checksum
        self.max_write_blocks = max_write_blocks
        self.sink = HandoffSink(D_AGENT, TTL_S, LANDING_S, checksum)
        self.wanted: dict[HandoffKey, Wanted] = {}
        self.windows = windows  # of each group, in blocks
        self.free = [set(range(NUM_BLOCKS)) for _ in windows]
        self.memory: dict[tuple[int, int], tuple[HandoffKey, int]] = {}  # what landed there last
        self.ghosts: list[tuple[float, actions.PostWrite]] = []  # failed, may land until then
        self.to_verify: list[HandoffKey] = []
        self.d_inbox: list[tuple[str, ToDecoder]] = []
        self.dead: list[str] = []  # whose death the decode worker has not noticed
        self.num_prefillers = 0
        self.num_requests = 0
        self.start_prefiller()

    def start_prefiller(self) -> None:
        self.num_prefillers += 1
        name = f"prefill-{self.num_prefillers}"
        source = HandoffSource(0.5, self.max_write_blocks, windows=self.windows)
        self.p = Prefiller(name, source)

    # -- the prefill worker's owner ------------------------------------------------------

    def carry_out_at_p(self, asked_for: list[actions.SourceAction]) -> None:
        for action in asked_for:
            match action:
                case actions.PostWrite():
                    self.check_write(action)
                    self.p.flying[action.write_id] = action
                case actions.SendBegun(key=key, agent=agent):
                    assert agent == D_AGENT
                    assert self.p.prompts[key].has_begun
                    begun = KvBegun(request_id=key.request_id, attempt=key.attempt)
                    self.d_inbox.append((self.p.name, begun))
                case actions.Close(key=key, agent=agent, error=error):
                    assert agent == D_AGENT
                    assert not self.writes_of(key)
                    closed = KvClosed(request_id=key.request_id, attempt=key.attempt, error=error)
                    self.d_inbox.append((self.p.name, closed))
                case actions.Release(key=key):
                    prompt = self.p.prompts[key]
                    assert not prompt.is_released
                    assert not self.writes_of(key)
                    prompt.is_released = True

    def check_write(self, write: actions.PostWrite) -> None:
        wanted, first, group = self.wanted[write.key], write.first_block, write.group
        assert wanted.is_fenced
        offset = first - wanted.first_blocks[group]
        upto = offset + len(write.target_blocks)
        assert write.target_blocks == wanted.groups[group][offset:upto]
        assert write.source_blocks == tuple(
            source_block(write.key, first + i) for i in range(len(write.target_blocks))
        )

    def writes_of(self, key: HandoffKey) -> list[actions.PostWrite]:
        under_way = [*self.p.flying.values(), *self.p.landed.values()]
        return [write for write in under_way if write.key == key]

    def finish_write(self, write_id: int, error: str | None) -> None:
        self.carry_out_at_p(self.p.source.write_finished(write_id, error))

    # -- the decode worker's owner -------------------------------------------------------

    def carry_out_at_d(self, asked_for: list[actions.SinkAction]) -> None:
        for action in asked_for:
            match action:
                case actions.SendAsk(peer=peer, ask=message):
                    assert not self.wanted[key_of(message)].is_granted
                    self.send_to_p(peer, message)
                case actions.Begun(key=key):
                    assert not self.wanted[key].is_begun
                    self.wanted[key].is_begun = True
                case actions.SendGrant(peer=peer, grant=message):
                    self.send_to_p(peer, message)
                case actions.SendRenew(peer=peer, renew=message):
                    assert not self.wanted[key_of(message)].is_aborted
                    self.send_to_p(peer, message)
                case actions.SendAbort(key=key, peer=peer):
                    self.send_to_p(peer, AbortMessage(key))
                case actions.Verify(key=key, blocks=blocks, digests=digests, group=group):
                    assert blocks == self.wanted[key].groups[group]
                    first = self.wanted[key].first_blocks[group]
                    assert digests == tuple(
                        digest(key, group, first + i) for i in range(len(blocks))
                    )
                    self.to_verify.append(key)
                case actions.Complete(key=key):
                    for group, blocks in enumerate(self.settle(key, "complete").groups):
                        self.check_arrived(key, group, range(len(blocks)))
                case actions.Failed(key=key, arrived=arrived):
                    first = self.settle(key, "failed").first_blocks[0]
                    self.check_arrived(key, 0, [index - first for index in arrived])
                case actions.Unfence(key=key, groups=groups):
                    self.unfence(key, groups)

    def send_to_p(self, peer: str, message: ToPrefiller) -> None:
        if peer == self.p.name:
            self.p.inbox.append(message)

    def settle(self, key: HandoffKey, outcome: str) -> Wanted:
        wanted = self.wanted[key]
        assert wanted.outcome == ""
        assert not wanted.is_aborted
        wanted.outcome = outcome
        return wanted

    def check_arrived(self, key: HandoffKey, group: int, offsets: Iterable[int]) -> None:
        wanted = self.wanted[key]
        for offset in offsets:
            found = self.memory[group, wanted.groups[group][offset]]
            assert found == (key, wanted.first_blocks[group] + offset)

    def unfence(self, key: HandoffKey, groups: tuple[tuple[int, ...], ...]) -> None:
        wanted = self.wanted[key]
        assert wanted.is_fenced
        assert list(groups) == wanted.groups
        wanted.is_fenced = False
        may_land = [*self.p.flying.values(), *(write for _, write in self.ghosts)]
        for group, blocks in enumerate(groups):
            landing = [write for write in may_land if write.group == group]
            assert not {block for write in landing for block in write.target_blocks} & {*blocks}
            assert not self.free[group] & {*blocks}
            self.free[group] |= {*blocks}

    def land(self, write: actions.PostWrite) -> None:
        for i, block in enumerate(write.target_blocks):
            assert block not in self.free[write.group], "it landed in a block that was given back"
            self.memory[write.group, block] = (write.key, write.first_block + i)

    # -- requests ------------------------------------------------------------------------

    @rule(num_blocks=st.integers(0, 6), first_block=st.integers(0, 6), open_now=st.booleans())
    def request(self, num_blocks: int, first_block: int, open_now: bool) -> None:
        if sum(not w.outcome and not w.is_aborted for w in self.wanted.values()) > 5:
            return
        key = HandoffKey(f"r{self.num_requests}", 1)
        self.num_requests += 1
        first_blocks = [
            max(min(first_block, num_blocks), kept_from(num_blocks, window))
            for window in self.windows
        ]
        self.wanted[key] = Wanted(self.p.name, first_blocks, num_blocks)
        self.p.prompts[key] = Prompt(num_blocks)
        if open_now:
            self.open_prompt(key)
        self.carry_out_at_d(self.sink.ask(key, self.p.name, self.now))

    @rule(data=st.data())
    def grant(self, data: st.DataObject) -> None:
        waiting = [key for key, wanted in self.wanted.items() if may_grant(wanted)]
        if waiting:
            self.try_grant(data.draw(st.sampled_from(waiting)))

    def try_grant(self, key: HandoffKey) -> None:
        wanted = self.wanted[key]
        missing = [wanted.num_blocks - first for first in wanted.first_blocks]
        if any(count > len(free) for count, free in zip(missing, self.free, strict=True)):
            return
        for count, free in zip(missing, self.free, strict=True):
            wanted.groups.append(tuple(sorted(free)[:count]))
            free -= {*wanted.groups[-1]}
        wanted.is_granted = wanted.is_fenced = True
        first, *others = [
            GroupBlocks(group=group, first_block=wanted.first_blocks[group], block_ids=list(blocks))
            for group, blocks in enumerate(wanted.groups)
        ]
        self.carry_out_at_d(
            self.sink.offer(key, first.first_block, first.block_ids, self.now, others)
        )

    def open_prompt(self, key: HandoffKey) -> None:
        prompt = self.p.prompts[key]
        prompt.is_open = True
        deadline = self.now + GRANT_WAIT_S
        self.carry_out_at_p(self.p.source.open(key, prompt.num_blocks, self.now, deadline))

    @rule(data=st.data())
    def prompt_arrives_at_p(self, data: st.DataObject) -> None:
        waiting = [key for key, prompt in self.p.prompts.items() if not prompt.is_open]
        if waiting:
            self.open_prompt(data.draw(st.sampled_from(waiting)))

    @rule(data=st.data())
    def prompt_begins_at_p(self, data: st.DataObject) -> None:
        waiting = [k for k, prompt in self.p.prompts.items() if prompt.is_open]
        waiting = [key for key in waiting if not self.p.prompts[key].has_begun]
        if waiting:
            self.begin_prompt(data.draw(st.sampled_from(waiting)))

    def begin_prompt(self, key: HandoffKey) -> None:
        self.p.prompts[key].has_begun = True
        self.carry_out_at_p(self.p.source.begin(key, self.now))

    @rule(data=st.data(), count=st.integers(1, 4))
    def chunk(self, data: st.DataObject, count: int) -> None:
        computing = [key for key in self.p.prompts if self.p.source.is_open(key)]
        computing = [key for key in computing if self.p.prompts[key].has_begun]
        if computing:
            self.compute(data.draw(st.sampled_from(computing)), count)

    def compute(self, key: HandoffKey, count: int) -> None:
        prompt = self.p.prompts[key]
        first, upto = prompt.num_ready, min(prompt.num_ready + count, prompt.num_blocks)
        prompt.num_ready = upto
        is_last = upto == prompt.num_blocks
        for group, window in enumerate(self.windows):
            if window is None:
                self.report_ready(key, group, first, upto)
            elif is_last and not prompt.is_computed:
                self.report_ready(key, group, kept_from(upto, window), upto)
        prompt.is_computed = is_last
        if is_last and self.p.source.is_open(key):
            self.carry_out_at_p(self.p.source.finish(key, self.now))

    def report_ready(self, key: HandoffKey, group: int, first: int, upto: int) -> None:
        blocks = [source_block(key, index) for index in range(first, upto)]
        ready = self.p.source.blocks_ready(key, first, blocks, 0, self.now, group)
        self.carry_out_at_p(ready)

    @rule(data=st.data(), error=st.sampled_from(["", "out of blocks"]))
    def p_aborts(self, data: st.DataObject, error: str) -> None:
        if self.p.prompts:
            key = data.draw(st.sampled_from(sorted(self.p.prompts)))
            self.carry_out_at_p(self.p.source.abort(key, error))

    @rule(data=st.data())
    def d_aborts(self, data: st.DataObject) -> None:
        live = [key for key, wanted in self.wanted.items() if not wanted.outcome]
        live = [key for key in live if not self.wanted[key].is_aborted]
        if live:
            self.give_up(data.draw(st.sampled_from(live)))

    def give_up(self, key: HandoffKey) -> None:
        self.wanted[key].is_aborted = True
        self.carry_out_at_d(self.sink.abort(key))

    @rule(ok=st.booleans())
    def verify(self, ok: bool) -> None:
        if self.to_verify:
            self.carry_out_at_d(self.sink.verified(self.to_verify.pop(), ok))

    # -- the network ---------------------------------------------------------------------

    @rule(data=st.data(), is_lost=st.sampled_from([False, False, False, True]))
    def message_to_p(self, data: st.DataObject, is_lost: bool) -> None:
        if self.p.inbox:
            index = data.draw(st.integers(0, len(self.p.inbox) - 1))
            message = self.p.inbox.pop(index)
            if not is_lost:
                self.receive_at_p(message)

    def receive_at_p(self, message: ToPrefiller) -> None:
        match message:
            case KvAsk():
                self.carry_out_at_p(self.p.source.ask(message, self.now))
            case KvGrant():
                self.carry_out_at_p(self.p.source.grant(message, self.now))
            case KvRenew():
                self.carry_out_at_p(self.p.source.renew(message, D_AGENT, self.now))
            case AbortMessage(key):
                self.carry_out_at_p(self.p.source.abort(key, agent=D_AGENT))

    @rule(data=st.data(), is_lost=st.sampled_from([False, False, False, True]))
    def message_to_d(self, data: st.DataObject, is_lost: bool) -> None:
        if self.d_inbox:
            index = data.draw(st.integers(0, len(self.d_inbox) - 1))
            _, message = self.d_inbox.pop(index)
            if not is_lost:
                self.receive_at_d(message)

    @rule(data=st.data())
    def message_to_d_twice(self, data: st.DataObject) -> None:
        if self.d_inbox:
            index = data.draw(st.integers(0, len(self.d_inbox) - 1))
            self.receive_at_d(self.d_inbox[index][1])

    @rule()
    def network_catches_up(self) -> None:
        while self.p.inbox:
            self.receive_at_p(self.p.inbox.pop(0))
        while self.d_inbox:
            self.receive_at_d(self.d_inbox.pop(0)[1])

    def receive_at_d(self, message: ToDecoder) -> None:
        if isinstance(message, KvBegun):
            self.carry_out_at_d(self.sink.begun(message))
        elif isinstance(message, KvClosed):
            self.carry_out_at_d(self.sink.closed(message, self.now))
        else:
            self.carry_out_at_d(self.sink.written(message))

    # -- the transport -------------------------------------------------------------------

    @rule(data=st.data())
    def write_lands(self, data: st.DataObject) -> None:
        if self.p.flying:
            self.land_flying(data.draw(st.sampled_from(sorted(self.p.flying))))

    def land_flying(self, write_id: int) -> None:
        write = self.p.flying.pop(write_id)
        self.p.landed[write_id] = write
        self.land(write)
        count = len(write.target_blocks)
        digests = [digest(write.key, write.group, write.first_block + i) for i in range(count)]
        note = write.notification(digests if self.checksum else ())
        self.d_inbox.append((self.p.name, note))

    @rule(data=st.data())
    def write_completes(self, data: st.DataObject) -> None:
        if self.p.landed:
            write_id = data.draw(st.sampled_from(sorted(self.p.landed)))
            del self.p.landed[write_id]
            self.finish_write(write_id, None)

    @rule(data=st.data())
    def write_fails(self, data: st.DataObject) -> None:
        if self.p.flying:
            write_id = data.draw(st.sampled_from(sorted(self.p.flying)))
            self.ghosts.append((self.now + LANDING_S, self.p.flying.pop(write_id)))
            self.finish_write(write_id, "the transport failed")

    @rule()
    def decode_agent_is_dropped(self) -> None:
        for write_id, write in sorted(self.p.flying.items()):
            self.ghosts.append((self.now + LANDING_S, write))
            del self.p.flying[write_id]
            self.finish_write(write_id, "the peer was removed")
        self.carry_out_at_p(self.p.source.peer_lost(D_AGENT))

    @rule(data=st.data())
    def ghost_lands(self, data: st.DataObject) -> None:
        if self.ghosts:
            index = data.draw(st.integers(0, len(self.ghosts) - 1))
            self.land(self.ghosts.pop(index)[1])

    # -- time and death ------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.1, 0.3, 1.0, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.ghosts = [ghost for ghost in self.ghosts if ghost[0] > self.now]
        self.carry_out_at_p(self.p.source.sweep(self.now))
        self.carry_out_at_d(self.sink.sweep(self.now))

    @precondition(lambda self: self.num_prefillers < 4)
    @rule()
    def prefiller_dies(self) -> None:
        self.ghosts += [(self.now + LANDING_S, write) for write in self.p.flying.values()]
        self.dead.append(self.p.name)
        self.start_prefiller()

    @rule()
    def death_is_noticed(self) -> None:
        while self.dead:
            self.carry_out_at_d(self.sink.agent_gone(self.dead.pop(), self.now))

    @invariant()
    def fences_are_consistent(self) -> None:
        if not hasattr(self, "wanted"):
            return
        num_fenced = 0
        behind_fences = [w for w in self.wanted.values() if w.is_fenced]
        for group, free in enumerate(self.free):
            fenced = [block for w in behind_fences for block in w.groups[group]]
            num_fenced += len(fenced)
            assert len(fenced) == len(set(fenced))
            assert free.isdisjoint(fenced)
            assert len(free) + len(fenced) == NUM_BLOCKS
        assert num_fenced == self.sink.num_fenced_blocks

    def compute_all(self, key: HandoffKey) -> None:
        prompt = self.p.prompts[key]
        if not prompt.is_open:
            self.open_prompt(key)
        if not prompt.has_begun:
            self.begin_prompt(key)
        if self.p.source.is_open(key):
            self.compute(key, prompt.num_blocks)

    def teardown(self) -> None:
        """With messages delivered and everybody's deadlines kept, everything ends."""
        if not hasattr(self, "wanted"):
            return
        self.death_is_noticed()
        for step in range(12):
            for key in self.p.prompts:
                self.compute_all(key)
            for write_id in sorted(self.p.flying):
                self.land_flying(write_id)
            while self.p.landed:
                self.finish_write(self.p.landed.popitem()[0], None)
            self.network_catches_up()
            for key, wanted in self.wanted.items():
                if may_grant(wanted):
                    self.try_grant(key)
            while self.to_verify:
                self.verify(True)
            if step == 6:  # the requests' deadlines
                for key, wanted in self.wanted.items():
                    if not wanted.outcome and not wanted.is_aborted:
                        self.give_up(key)
            self.time_passes(TTL_S / 3)
        assert self.sink.num_open == 0
        assert self.sink.num_fenced_blocks == 0
        assert self.p.source.num_open == 0
        assert self.p.source.num_outstanding == 0
        assert all(free == set(range(NUM_BLOCKS)) for free in self.free)
        assert all(wanted.outcome or wanted.is_aborted for wanted in self.wanted.values())
        assert all(prompt.is_released for prompt in self.p.prompts.values())


def may_grant(wanted: Wanted) -> bool:
    """Whether the source has begun and the decode worker still wants the blocks."""
    is_over = wanted.is_granted or wanted.is_aborted or bool(wanted.outcome)
    return wanted.is_begun and not is_over


def source_block(key: HandoffKey, index: int) -> int:
    """Where the prefill worker holds a prompt's block."""
    return 1000 * int(key.request_id[1:]) + index


def digest(key: HandoffKey, group: int, index: int) -> bytes:
    """The digest of a prompt's block."""
    return f"{key}:{group}:{index}".encode()


def kept_from(num_blocks: int, window: int | None) -> int:
    """The first block of a computed prompt that the prefill worker still keeps."""
    return 0 if window is None else max(0, num_blocks - window)


TestHandoffPair = HandoffPair.TestCase
TestHandoffPair.settings = settings(
    max_examples=times(30, 300), stateful_step_count=80, deadline=None, derandomize=True
)
