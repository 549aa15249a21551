"""A prefill and a decode worker against each other, in one process, over a network that delays.

Each connection keeps its order, as ZeroMQ does; between connections anything may overtake
anything. Requests are retried while the old attempt is still fenced, repeated and aborted; peers
are forgotten, or die and are replaced; writes fail and land late, grants expire, steps raise. The
steps of each worker run one after the other, or one ahead and as late as a card could run them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from process.sockets.control import Peer
from protocol.messages import Abort, AttemptFailed, FirstToken, KvPeer, PrefillDone, StepTokens
from tests.effort import NIGHTLY, times
from tests.unit.fake_model import BLOCK, VOCAB, continuation
from tests.unit.fake_peers import Write
from tests.unit.worker_harness import (
    ROUTER,
    TTL_S,
    Asked,
    Clock,
    DecodeBench,
    Key,
    LateWrite,
    PrefillBench,
    finish,
    give_up,
    land,
    pinned_for_peers,
)

CHANNELS = ("router to P", "router to D", "D to P", "P to D")
PROMPTS = [[(7 * i + start) % VOCAB for i in range(length)] for start, length in
           ((0, 1), (0, 3), (0, 4), (0, 9), (0, 16), (0, 22), (5, 5), (5, 12), (9, 8))]  # fmt: skip


class WorkerPair(RuleBasedStateMachine):
    """No block is lost or owned twice; every attempt ends once, with the right tokens."""

    @initialize(
        checksum=st.booleans(),
        blocks=st.integers(9, 24),
        ahead=st.booleans(),
        prefill_ahead=st.booleans(),
        chunk=st.sampled_from([BLOCK, 2 * BLOCK]),
    )
    def begin(
        self,
        checksum: bool,
        blocks: int,
        ahead: bool = False,
        prefill_ahead: bool = False,
        chunk: int = 2 * BLOCK,
    ) -> None:
        self.clock = Clock()
        self.prefill_ahead = prefill_ahead
        self.chunk = chunk
        self.d = DecodeBench("d", self.clock, blocks, checksum, one_step_ahead=ahead)
        self.d.peers.answers_asks = False  # P answers
        self.num_prefillers = 0
        self.checksum = checksum
        self.blocks = blocks
        self.channels: dict[str, list[Any]] = {name: [] for name in CHANNELS}
        self.asked: dict[Key, Asked] = {}
        self.late: list[LateWrite] = []
        self.landed: list[Write] = []
        self.dead: list[str] = []  # incarnations whose death D has not noticed
        self.linked: set[str] = set()  # incarnations that have D's descriptor
        self.is_calm = True
        self.start_prefiller()

    def start_prefiller(self) -> None:
        self.num_prefillers += 1
        self.p = PrefillBench(
            f"p{self.num_prefillers}",
            self.clock,
            self.blocks,
            self.checksum,
            one_step_ahead=self.prefill_ahead,
            scheduler_fields={"chunk_max_tokens": self.chunk},
        )
        self.p_peer = KvPeer(
            worker_id=self.p.name, incarnation=f"{self.p.name}-i", control="inproc://p"
        )

    # -- what routers do -----------------------------------------------------------------------

    @rule(prompt=st.sampled_from(PROMPTS), tokens=st.integers(1, 9), remote=st.booleans())
    def ask(self, prompt: list[int], tokens: int, remote: bool) -> None:
        if len(self.open_attempts()) < 7:
            key = (f"r{len(self.asked)}", 1)
            self.launch(key, Asked(prompt, 0, tokens, self.p_peer if remote else None))

    @rule(choice=st.integers(0, 9), remote=st.booleans(), politely=st.booleans())
    def retry(self, choice: int, remote: bool, politely: bool) -> None:
        """The next attempt, with what the last one has given so far."""
        names = dict(sorted(self.asked))
        if not names:
            return
        name = sorted(names)[choice % len(names)]
        former = self.asked[name, names[name]]
        num_output = former.num_output
        while num_output in former.tokens:
            num_output += 1
        if num_output >= former.max_tokens:
            return
        peer = self.p_peer if remote else None
        self.give_up((name, names[name]), politely or former.peer != peer)
        so_far = continuation(former.prompt, num_output)
        assert [former.tokens[i] for i in range(former.num_output, num_output)] == so_far[
            former.num_output :
        ]
        asked = Asked(former.prompt, num_output, former.max_tokens, peer)
        self.launch((name, names[name] + 1), asked)

    @rule(choice=st.integers(0, 9))
    def abort(self, choice: int) -> None:
        keys = self.open_attempts()
        if keys:
            self.give_up(keys[choice % len(keys)], politely=True)

    @rule(channel=st.sampled_from(CHANNELS[:2]), choice=st.integers(0, 9))
    def repeat(self, channel: str, choice: int) -> None:
        """A message that was sent before comes again."""
        keys = [key for key, asked in sorted(self.asked.items()) if not asked.was_cut_off]
        if keys:
            key = keys[choice % len(keys)]
            generate, *prefill = self.asked[key].legs(key)
            if channel == "router to D":
                self.channels[channel].append(generate)
            elif self.asked[key].peer == self.p_peer:
                self.channels[channel] += prefill

    def launch(self, key: Key, asked: Asked) -> None:
        self.asked[key] = asked
        generate, *prefill = asked.legs(key)
        self.channels["router to D"].append(generate)
        self.channels["router to P"] += prefill

    def give_up(self, key: Key, politely: bool) -> None:
        """Impolitely: the next attempt itself is the only sign that this one is over."""
        self.asked[key].is_given_up = True
        if politely:
            for channel in CHANNELS[:2]:
                self.channels[channel].append(Abort(request_id=key[0], attempt=key[1]))

    def open_attempts(self) -> list[Key]:
        return [k for k, a in sorted(self.asked.items()) if not a.is_given_up and not a.ends["d"]]

    # -- what the network does -----------------------------------------------------------------

    @rule(channel=st.sampled_from(CHANNELS), count=st.integers(1, 8))
    def deliver(self, channel: str, count: int) -> None:
        queue = self.channels[channel]
        messages, queue[:] = queue[:count], queue[count:]
        for message in messages:
            if channel == "router to P":
                self.p.server.inbox.append((ROUTER, message))
            elif channel == "router to D":
                self.d.server.inbox.append((ROUTER, message))
            elif channel == "D to P":
                self.p.server.inbox.append((self.d.as_peer, message))
            else:
                self.d.peers.inbox.append((self.p_peer.incarnation, message))

    @rule(choice=st.integers(0, 9))
    def write_lands(self, choice: int) -> None:
        waiting = [write for write in self.p.transfers.writes if write not in self.landed]
        if waiting:
            write = waiting[choice % len(waiting)]
            self.check_fence(write)
            land(write, self.p, self.d)
            self.landed.append(write)

    def check_fence(self, write: Write) -> None:
        manager = self.d.scheduler.blocks
        assert all(manager._pins[block] for block in write.target_blocks), "into a free block"

    @rule(choice=st.integers(0, 9))
    def write_is_finished(self, choice: int) -> None:
        done = [write for write in self.p.transfers.writes if write in self.landed]
        if done:
            finish(done[choice % len(done)], self.p)

    @rule(choice=st.integers(0, 9), late=st.booleans(), whole=st.booleans())
    def write_fails(self, choice: int, late: bool, whole: bool) -> None:
        """Its transport drops the peer; the data may land a little later all the same."""
        waiting = [write for write in self.p.transfers.writes if write not in self.landed]
        if not waiting:
            return
        self.is_calm = False
        write = waiting[choice % len(waiting)]
        self.p.transfers.fail(write, "the connection was reset")
        if late:
            self.late.append(give_up(write, self.p, whole))

    def give_up_writes(self, whole: bool) -> None:
        waiting = [write for write in self.p.transfers.writes if write not in self.landed]
        self.late += [give_up(write, self.p, whole) for write in waiting]

    @rule(whole=st.booleans())
    def connection_is_lost(self, whole: bool) -> None:
        """P forgets D, and what was on its way is lost; D notices and introduces itself again."""
        if self.p_peer.incarnation not in self.linked:
            return
        self.is_calm = False
        for queue in (self.channels["D to P"], self.channels["P to D"]):
            queue.clear()
        self.p.server.inbox = [each for each in self.p.server.inbox if each[0] == ROUTER]
        self.d.peers.inbox.clear()
        self.give_up_writes(whole)
        self.d.as_peer = Peer(self.d.as_peer.identity + b"'", "d", self.d.as_peer.role)
        old = Peer(self.d.as_peer.identity[:-1], "d", self.d.as_peer.role)
        self.p.server.gone.append(old)
        self.turn_p()
        self.d.peers.forgotten.append(self.p_peer.incarnation)
        self.channels["D to P"].append(self.d.descriptor)

    @rule(whole=st.booleans())
    def prefill_worker_dies(self, whole: bool) -> None:
        if self.num_prefillers >= 4:
            return
        self.is_calm = False
        self.give_up_writes(whole)
        for name in ("router to P", "D to P", "P to D"):
            self.channels[name].clear()
        self.d.peers.inbox.clear()
        self.d.peers.dead.append(self.p_peer.incarnation)
        self.turn_d()
        self.dead.append(self.p_peer.incarnation)
        self.p.close()
        self.start_prefiller()

    @rule(worker=st.sampled_from("pd"))
    def router_is_lost(self, worker: str) -> None:
        """One worker loses it, with what was on its way; it gives up and tells the other."""
        self.is_calm = False
        bench, turn = (self.p, self.turn_p) if worker == "p" else (self.d, self.turn_d)
        bench.server.gone.append(ROUTER)
        bench.server.inbox = [each for each in bench.server.inbox if each[0] != ROUTER]
        self.channels[f"router to {worker.upper()}"].clear()
        turn()
        for key, asked in self.asked.items():
            self.give_up(key, politely=True)
            asked.was_cut_off = True

    @rule(rounds=st.integers(1, 5), writes_land=st.booleans())
    def everything_goes_on(self, rounds: int, writes_land: bool = True) -> None:
        """Without a fault, and without delay but that of writes."""
        for _ in range(rounds):
            for channel in CHANNELS:
                self.deliver(channel, 99)
            self.turn_p()
            self.turn_d()
            if not writes_land:
                continue
            while any(write not in self.landed for write in self.p.transfers.writes):
                self.write_lands(0)
            while self.p.transfers.writes:
                self.write_is_finished(0)

    # -- what workers do -----------------------------------------------------------------------

    @rule(turns=st.integers(1, 4))
    def turn_p(self, turns: int = 1) -> None:
        for _ in range(turns):
            self.p.worker.turn()
            for peer, message in self.p.server.sent:
                if peer == ROUTER:
                    self.note("p", message)
                elif peer == self.d.as_peer:
                    self.channels["P to D"].append(message)
            self.p.server.sent.clear()

    @rule(turns=st.integers(1, 4))
    def turn_d(self, turns: int = 1) -> None:
        for _ in range(turns):
            self.d.worker.turn()
            for _, message in self.d.server.sent:
                self.note("d", message)
            self.d.server.sent.clear()
            incarnation = self.p_peer.incarnation
            if incarnation in self.d.peers.connected and incarnation not in self.linked:
                self.linked.add(incarnation)
                self.channels["D to P"].append(self.d.descriptor)
            for incarnation, message in self.d.peers.sent:
                if incarnation == self.p_peer.incarnation:
                    self.channels["D to P"].append(message)
                elif incarnation in self.dead:  # a new link to it would time out
                    self.d.peers.dead.append(incarnation)
            self.d.peers.sent.clear()

    @rule(choice=st.integers(0, 9))
    def logits_are_not_finite(self, choice: int) -> None:
        names = sorted({name for name, _ in self.open_attempts()})
        if names:
            self.is_calm = False
            name = names[choice % len(names)]
            self.p.model.broken ^= {name}
            self.d.model.broken ^= {name}

    @rule(worker=st.sampled_from("pd"), when=st.sampled_from(["launch", "late"]))
    def step_raises(self, worker: str, when: str) -> None:
        self.is_calm = False
        (self.p if worker == "p" else self.d).model.explodes = when

    @rule(seconds=st.sampled_from([0.1, 0.6, 1.5, TTL_S + 0.1]))
    def time_passes(self, seconds: float) -> None:
        self.is_calm = self.is_calm and seconds < TTL_S / 4
        until = self.clock.now + seconds
        for late in [late for late in self.late if late.due <= until]:
            self.clock.now = max(self.clock.now, late.due)
            self.late.remove(late)
            self.check_fence(late.write)
            late.land(self.d)
            self.turn_d()
        self.clock.now = until

    # -- what must hold ------------------------------------------------------------------------

    def note(self, worker: str, message: Any) -> None:
        """A router hears something."""
        match message:
            case StepTokens():
                for tokens in message.sequences:
                    asked = self.asked[tokens.request_id, tokens.attempt]
                    assert not asked.ends["d"], "tokens after the end"
                    self.take(asked, tokens.index, tokens.token_ids[0])
                    asked.ends["d"] += tokens.finish is not None
            case FirstToken():
                asked = self.asked[message.request_id, message.attempt]
                assert not asked.ends["p"], "a token after the end"
                self.take(asked, message.index, message.token_id)
            case PrefillDone() | AttemptFailed():
                asked = self.asked[message.request_id, message.attempt]
                asked.ends[worker] += 1
                if isinstance(message, AttemptFailed) and not asked.is_given_up:
                    assert not self.is_calm, message.reason
                    if worker == "d" and asked.peer:  # not the other way: D must see itself
                        abort = Abort(request_id=message.request_id, attempt=message.attempt)
                        self.channels["router to P"].append(abort)

    def take(self, asked: Asked, index: int, token_id: int) -> None:
        assert token_id == continuation(asked.prompt, index + 1)[index], "the wrong token"
        assert asked.tokens.setdefault(index, token_id) == token_id

    @invariant()
    def every_block_has_its_owners(self) -> None:
        if not hasattr(self, "d"):
            return
        owners = {
            "d": [
                *self.d.scheduler.sequences,
                *self.d.scheduler._leaving,
            ],
            "p": [
                *[task.sequence for task in self.p.role.tasks],
                *[s for s in self.p.scheduler._leaving if not self.p.role.tasks.find_of(s)],
            ],
        }
        for bench in (self.d, self.p):
            manager = bench.scheduler.blocks
            manager.check()
            held = Counter(b for s in owners[bench.name[0]] for b in s.block_table)
            held += Counter(pinned_for_peers(bench))
            assert held == Counter({b: n for b, n in enumerate(manager._pins) if n}), bench.name
            assert bench.model.strays == [], "a step wrote to free blocks"

    @invariant()
    def no_attempt_ends_twice(self) -> None:
        for key, asked in getattr(self, "asked", {}).items():
            assert max(asked.ends.values(), default=0) <= 1, (key, asked.ends)

    def teardown(self) -> None:
        if not hasattr(self, "d"):
            return
        self.p.model.broken.clear()
        self.d.model.broken.clear()
        for _ in range(60):
            self.everything_goes_on(rounds=1)
            if self.is_idle():
                break
            self.time_passes(0.2)
        self.check_idle()
        self.p.close()
        self.d.close()

    def is_idle(self) -> bool:
        busy = len(self.p.role.tasks) + len(self.d.role.tasks) + len(self.d.role._inbound.fenced)
        busy = busy or self.d.engine.is_ahead or self.p.engine.is_ahead
        handoffs = self.p.source.num_open + self.d.sink.num_open
        return not busy and not handoffs and not any(self.channels.values())

    def check_idle(self) -> None:
        assert self.is_idle(), "something is left over"
        for bench in (self.p, self.d):
            assert bench.scheduler.blocks.num_pinned == 0
            assert bench.scheduler.sequences == []
        assert not self.p.role.outbound._writes
        assert not self.p.role.outbound._tokens
        assert not self.p.role.outbound._fences
        assert not self.p.role.outbound._speakers
        assert not self.p.source.num_outstanding
        for key, asked in self.asked.items():
            if asked.is_given_up:
                continue
            assert asked.ends["d"] == 1, f"{key} never ended"
            if self.is_calm:
                expected = continuation(asked.prompt, asked.max_tokens)[asked.num_output :]
                assert [token for _, token in sorted(asked.tokens.items())] == expected
                assert asked.ends["p"] == (asked.peer is not None)


TestWorkerPair = WorkerPair.TestCase
TestWorkerPair.settings = settings(
    max_examples=times(25, 600),
    derandomize=not NIGHTLY,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_a_write_lands_late_when_its_source_is_in_use_again() -> None:
    """P loses D with writes outstanding, and computes another prompt where they came from."""
    pair = WorkerPair()
    pair.begin(checksum=False, blocks=9)
    prompt = PROMPTS[3]
    pair.ask(prompt=prompt, tokens=2, remote=True)
    pair.everything_goes_on(rounds=5, writes_land=False)
    pair.connection_is_lost(whole=True)
    pair.ask(prompt=PROMPTS[4], tokens=1, remote=True)
    pair.everything_goes_on(rounds=5, writes_land=False)
    now = [pair.p.memory[list(late.write.source_blocks)] for late in pair.late]
    assert any((there != late.data).any() for there, late in zip(now, pair.late, strict=True))
    pair.time_passes(1.0)
    pair.everything_goes_on(rounds=3)
    assert pair.asked["r0", 1].tokens == dict(enumerate(continuation(prompt, 2)))
    pair.teardown()


def test_blocks_arrive_whole_though_they_are_sent_before_they_are_computed() -> None:
    """Writes land as soon as they may, while P's next steps are under way."""
    pair = WorkerPair()
    pair.begin(checksum=False, blocks=24, prefill_ahead=True, chunk=BLOCK)
    for prompt in (PROMPTS[5], PROMPTS[5], PROMPTS[7], PROMPTS[4]):
        pair.ask(prompt=prompt, tokens=3, remote=True)
    num_waited = 0
    for _ in range(20):
        pair.everything_goes_on(rounds=1, writes_land=False)
        num_waited += sum(not write.fence.is_done() for write in pair.p.transfers.writes)
        pair.everything_goes_on(rounds=1)
        pair.every_block_has_its_owners()
    assert pair.is_idle()
    assert num_waited > 0
    pair.teardown()
