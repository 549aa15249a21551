"""Several routers, prefill and decode workers in one process, with a network that a test drives.

Real are the workers down to their schedulers, block managers and handoff machines; see
`worker_harness`. The routers are as simple as may be: they place at random, start a failed attempt
again where it broke off, and refuse a request if every decode worker has given it back for lack of
room. Each connection keeps its order; between connections anything may overtake anything.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from kv_transfer.handoff.states import SinkState
from process.sockets.control import Peer
from protocol.layout import KvLayout
from protocol.messages import (
    Abort,
    AttemptFailed,
    FirstToken,
    Generate,
    KvHolder,
    KvPeer,
    Prefill,
    Role,
    StepTokens,
)
from scheduling.fetch_rule import PairCost
from tests.sequences import greedy
from tests.unit.fake_model import BLOCK, continuation
from tests.unit.fake_peers import Write
from tests.unit.held_grammar import HeldGrammar
from tests.unit.worker_harness import (
    LAYOUT,
    Bench,
    Clock,
    DecodeBench,
    Key,
    PrefillBench,
    finish,
    land,
    pinned_for_peers,
)
from worker.inbound.fetch_rates import FetchPairs


class FastPairs(FetchPairs):
    """Pairs of workers for which every fetch is worthwhile."""

    def __init__(self) -> None:
        super().__init__(1e12)

    def cost(self, peer: str, now: float) -> PairCost:
        return PairCost(0.0, 1e12)


def answers(name: str) -> str:
    """The connection by which a source answers its sinks; another one than its own as a sink."""
    return f"answers of {name}"


def peer_of(name: str) -> KvPeer:
    """A worker, as messages name it."""
    return KvPeer(worker_id=name, incarnation=f"{name}-i", control=f"inproc://{name}")


@dataclass
class Request:
    """One request, as its router sees it."""

    name: str
    router: Peer
    prompt: list[int]
    max_tokens: int
    priority: int
    has_grammar: bool
    attempt: int = 0
    p: str | None = None
    d: str = ""
    tokens: dict[int, int] = field(default_factory=dict)
    given_back_by: set[str] = field(default_factory=set)
    outcome: str = ""  # done, refused, aborted
    num_failures: int = 0
    holder: str = ""  # where its first attempt may fetch

    @property
    def key(self) -> Key:
        """The current attempt."""
        return (self.name, self.attempt)

    @property
    def num_blocks(self) -> int:
        """Blocks of all its tokens."""
        return -(-(len(self.prompt) + self.max_tokens) // BLOCK)


class WorkerFleet:
    """`sizes` are the numbers of prefill workers, decode workers and routers, `pools` the blocks of
    each role's pools, or large pages. `channels` hold what is under way, by (sender, receiver).
    Workers have host memory for `host_slots` blocks below their pools."""

    def __init__(
        self,
        sizes: tuple[int, int, int],
        pools: tuple[int, int],
        *,
        host_slots: int = 0,
        layout: KvLayout = LAYOUT,
    ) -> None:
        self.host_slots = host_slots
        self.layout = layout
        self.clock = Clock()
        num_p, num_d, num_routers = sizes
        self.pools = dict(zip("pd", pools, strict=True))
        self.workers: dict[str, Bench] = {}
        self.num_born = 0
        self.routers = [
            Peer(f"router-{i}".encode(), f"router-{i}", Role.ROUTER) for i in range(num_routers)
        ]
        self.requests: dict[str, Request] = {}
        self.channels: dict[tuple[str, str], list[Any]] = defaultdict(list)
        self.linked: set[tuple[str, str]] = set()  # (d, p) that have introduced themselves
        self.landed: list[Write] = []
        self.frozen: set[str] = set()
        self.silent: set[str] = set()  # frozen ones that everybody has noticed
        self.grammars: list[HeldGrammar] = []
        self.computed: Counter[Key] = Counter()  # prompt tokens up to an attempt's first token
        self.is_calm = True
        for role, number in (("p", num_p), ("d", num_d)):
            for _ in range(number):
                self.start(role)

    # -- workers ------------------------------------------------------------------------------

    def start(self, role: str) -> Bench:
        """Let a new worker join."""
        self.num_born += 1
        name = f"{role}{self.num_born}"
        bench: Bench
        fields: dict[str, Any] = {"host_slots": self.host_slots, "layout": self.layout}
        if role == "p":
            bench = PrefillBench(name, self.clock, self.pools["p"], **fields)
        else:
            bench = DecodeBench(name, self.clock, self.pools["d"], **fields)
        bench.peers.answers_asks = False  # prefill workers answer
        fetches: Any = bench.role._fetches  # type: ignore[attr-defined]
        fetches._pairs = FastPairs()
        self.workers[name] = bench
        return bench

    def names(self, role: str) -> list[str]:
        """Workers of a role that live, frozen or not."""
        return [name for name in self.workers if name[0] == role]

    def p(self, name: str) -> PrefillBench:
        """A prefill worker."""
        bench = self.workers[name]
        assert isinstance(bench, PrefillBench)
        return bench

    def d(self, name: str) -> DecodeBench:
        """A decode worker."""
        bench = self.workers[name]
        assert isinstance(bench, DecodeBench)
        return bench

    def kill(self, name: str) -> None:
        """End a worker's process. Everybody notices, and another worker takes its place."""
        self.is_calm = False
        bench = self.workers.pop(name)
        self.frozen.discard(name)
        self.silent.discard(name)
        for ends in [ends for ends in self.channels if {name, answers(name)} & set(ends)]:
            del self.channels[ends]
        for other in self.workers.values():
            other.server.inbox = [each for each in other.server.inbox if each[0].name != name]
            other.server.gone.append(bench.as_peer)
            other.peers.inbox = [e for e in other.peers.inbox if e[0] != f"{name}-i"]
            other.peers.answering.discard(f"{name}-i")
            if f"{name}-i" in other.peers.connected:
                other.peers.dead.append(f"{name}-i")
        bench.close()
        self.start(name[0])
        for request in self.requests.values():
            if not request.outcome and name in (request.p, request.d):
                self.fail(request)

    # -- routers ------------------------------------------------------------------------------

    def ask(self, request: Request, p: str | None, d: str) -> None:
        """Send a new request."""
        self.requests[request.name] = request
        self.launch(request, p, d)

    def launch(self, request: Request, p: str | None, d: str) -> None:
        """Send the next attempt, with the tokens that the client has."""
        request.attempt += 1
        request.p, request.d = p, d
        num_output = 0
        while num_output in request.tokens:
            num_output += 1
        fields: dict[str, Any] = {
            "request_id": request.name,
            "attempt": request.attempt,
            "token_ids": request.prompt + continuation(request.prompt, num_output),
            "num_output": num_output,
            "sampling": greedy(request.max_tokens),
            "priority": request.priority,
            "deadline_ms": 60_000,
        }
        peer = None
        if request.holder in self.workers and request.holder != (p or d):
            # a hint that may be right, or not
            hint = KvHolder(peer=peer_of(request.holder), num_blocks=len(fields["token_ids"]))
            fields["holders"] = [hint]
        if p is not None:
            peer = peer_of(p)
            self.channels[request.router.name, p].append(Prefill(target=d, **fields))
        self.channels[request.router.name, d].append(Generate(prefill=peer, **fields))

    def fail(self, request: Request) -> None:
        """An attempt failed: end it everywhere, and start the next one."""
        request.num_failures += 1
        self.tell_both(request)
        self.place(request, request.num_failures)

    def place(self, request: Request, choice: int) -> None:
        """Place a request on workers that are not known to be silent or full. Refuses it if there
        are none."""
        decoders = [name for name in self.names("d") if name not in request.given_back_by]
        if not decoders:
            request.outcome = "refused"
            return
        prefillers: list[str | None] = [n for n in self.names("p") if n not in self.silent]
        prefillers.append(None)
        p = prefillers[choice % len(prefillers)]
        self.launch(request, p, decoders[choice % len(decoders)])

    def abort(self, request: Request) -> None:
        """Abort a request because its client goes away."""
        request.outcome = "aborted"
        self.tell_both(request)

    def tell_both(self, request: Request) -> None:
        for name in (request.p, request.d):
            if name in self.workers:
                abort = Abort(request_id=request.name, attempt=request.attempt)
                self.channels[request.router.name, name].append(abort)

    def hear(self, worker: str, message: Any) -> None:
        """A router hears of one of its requests."""
        match message:
            case StepTokens():
                for each in message.sequences:
                    request = self.requests[each.request_id]
                    self.take(request, each.index, each.token_ids[0])
                    if each.index == 0:
                        self.check_cached(request, each.attempt, each.cached_tokens)
                    is_current = each.attempt == request.attempt and not request.outcome
                    if each.finish is not None and is_current:
                        request.outcome = "done"
            case FirstToken():
                request = self.requests[message.request_id]
                self.take(request, message.index, message.token_id)
                if message.index == 0:
                    told = message.trace.cached_tokens + message.trace.fetched_tokens
                    self.check_cached(request, message.attempt, told)
                is_current = message.attempt == request.attempt and not request.outcome
                if message.finish is not None and is_current:
                    request.outcome = "done"
            case AttemptFailed():
                request = self.requests[message.request_id]
                if message.attempt == request.attempt and not request.outcome:
                    assert not self.is_calm, f"{worker}: {message.reason}"
                    assert message.retryable, f"{worker}: {message.reason}"
                    if message.lacks_room:
                        request.given_back_by.add(worker)
                    self.fail(request)

    def take(self, request: Request, index: int, token_id: int) -> None:
        assert token_id == continuation(request.prompt, index + 1)[index], "the wrong token"
        assert request.tokens.setdefault(index, token_id) == token_id

    def check_cached(self, request: Request, attempt: int, told: int | None) -> None:
        """What came from a cache is the prompt minus what the attempt computed of it."""
        computed = self.computed[request.name, attempt]
        assert told == max(0, len(request.prompt) - computed), (told, computed)

    # -- network --------------------------------------------------------------------------------

    def deliver(self, ends: tuple[str, str], count: int) -> None:
        """Let the next messages of a connection arrive. The worker handles them in its next
        turn."""
        sender, receiver = ends
        queue = self.channels[ends]
        messages, queue[:] = queue[:count], queue[count:]
        bench = self.workers[receiver]
        for message in messages:
            if sender.startswith("router"):
                router = next(each for each in self.routers if each.name == sender)
                bench.server.inbox.append((router, message))
            elif sender in self.workers:
                bench.server.inbox.append((self.workers[sender].as_peer, message))
            else:
                source = sender.removeprefix(answers(""))
                bench.peers.inbox.append((f"{source}-i", message))

    def busy_channels(self) -> list[tuple[str, str]]:
        """Connections with something under way."""
        return sorted(ends for ends, queue in self.channels.items() if queue)

    def turn(self, name: str) -> None:
        """Run one turn of a worker's loop, unless the worker is frozen."""
        if name in self.frozen:
            return
        bench = self.workers[name]
        worker: Any = bench.worker  # type: ignore[attr-defined]
        worker.turn()
        self.computed += bench.steps.computed
        bench.steps.computed.clear()
        self.slow_down_grammars(bench)
        sent, bench.server.sent = bench.server.sent, []
        for peer, message in sent:
            if peer.role is Role.ROUTER:
                self.hear(name, message)
            elif peer.name in self.workers:
                self.channels[answers(name), peer.name].append(message)
        self.carry_to_sources(bench)

    def carry_to_sources(self, bench: Bench) -> None:
        alive = {f"{name}-i" for name in self.workers}
        bench.peers.answering = alive.intersection(bench.peers.connected)
        sent, bench.peers.sent = bench.peers.sent, []
        for incarnation, message in sent:
            p = incarnation.removesuffix("-i")
            if p not in self.workers:
                bench.peers.dead.append(incarnation)  # a new link to it would time out
                continue
            if (bench.name, p) not in self.linked:
                self.linked.add((bench.name, p))
                self.channels[bench.name, p].append(bench.descriptor)
            self.channels[bench.name, p].append(message)

    def slow_down_grammars(self, bench: Bench) -> None:
        """A grammar that has just come in is not compiled, and makes no mask after a token, before
        a test says so."""
        for sequence in bench.scheduler.sequences:
            request = self.requests[sequence.request_id]
            if request.has_grammar and sequence.grammar is None and not sequence.block_table:
                sequence.grammar = HeldGrammar(is_ready=False, is_slow=True)
                self.grammars.append(sequence.grammar)

    def compile(self, count: int) -> None:
        """Make grammars ready."""
        for grammar in [each for each in self.grammars if not each.is_ready][:count]:
            grammar.is_ready = True

    def give_masks(self, count: int) -> None:
        """Provide masks."""
        for grammar in [each for each in self.grammars if each.awaits_mask][:count]:
            grammar.give_mask()

    def miss_mask(self, choice: int) -> None:
        """Withhold an expected mask in the next step that needs it."""
        names = [name for name, each in self.requests.items() if each.has_grammar]
        if names:
            for bench in self.workers.values():
                bench.model.late_masks = {names[choice % len(names)]}

    def land_writes(self, count: int) -> None:
        """Let writes arrive. Their writers learn of it when they run."""
        for bench in list(self.workers.values()):
            for write in [each for each in bench.transfers.writes if each not in self.landed]:
                others = self.workers.values()
                target = next((d for d in others if write.agent in d.transfers.names), None)
                if target is None or count <= 0:
                    continue
                count -= 1
                pins = target.scheduler.pools.managers[write.group]._pins
                assert all(pins[block] for block in write.target_blocks), "into a free block"
                land(write, bench, target)
                self.landed.append(write)

    def finish_writes(self) -> None:
        """Writers learn which of their writes have landed."""
        for bench in self.workers.values():
            for write in [each for each in bench.transfers.writes if each in self.landed]:
                self.landed.remove(write)
                finish(write, bench)

    def notice_silence(self) -> None:
        """Let everybody notice that frozen workers are silent."""
        self.silent = set(self.frozen)
        for bench in self.workers.values():
            bench.peers.mute = [f"{each}-i" for each in self.silent]

    def round(self) -> None:
        """Run everything once, without delays."""
        for ends in self.busy_channels():
            self.deliver(ends, 99)
        for name in list(self.workers):
            self.turn(name)
        self.land_writes(99)
        self.finish_writes()
        self.compile(99)
        self.give_masks(99)

    # -- what must hold --------------------------------------------------------------------------

    def check_blocks(self) -> None:
        """Every pinned block has an owner, and no block of an owner is free."""
        for name, bench in self.workers.items():
            role: Any = bench.role  # type: ignore[attr-defined]
            if name[0] == "p":
                owners = [task.sequence for task in role.tasks]
            else:
                owners = [*bench.scheduler.sequences, *bench.scheduler._leaving]
            for group, manager in enumerate(bench.scheduler.pools.managers):
                manager.check()
                held = Counter(b for sequence in owners for b in sequence.tables[group].blocks)
                held += Counter(pinned_for_peers(bench, group))
                pinned = Counter({b: pins for b, pins in enumerate(manager._pins) if pins})
                assert held == pinned, (name, group)

    def check_nothing_is_held(self) -> None:
        """No worker has a block in use, an open handoff or a write into a free block."""
        for name, bench in self.workers.items():
            assert bench.scheduler.pools.num_used == 0, name
            assert not bench.model.strays, name
            assert bench.sink.num_open == 0, name
            bench.scheduler.pools.check()

    def is_idle(self) -> bool:
        """Whether nothing is left of any request."""
        return not (
            any(bench.scheduler.pools.num_used for bench in self.workers.values())
            or any(bench.scheduler.sequences for bench in self.workers.values())
            or any(not request.outcome for request in self.requests.values())
        )

    @property
    def awaits_landing(self) -> bool:
        """Whether a fence stands until late writes must have landed: the only time that the
        protocol prescribes."""
        timed = (SinkState.LANDING, SinkState.CLOSED_EARLY)
        return any(
            handoff.state in timed
            for bench in self.workers.values()
            for handoff in bench.sink._handoffs.values()
        )

    @property
    def awaits_frozen_holder(self) -> bool:
        """Whether a fetch is granted to a frozen worker: only its deadline can end the wait."""
        return any(
            key.part and handoff.peer.removesuffix("-i") in self.frozen
            for bench in self.workers.values()
            for key, handoff in bench.sink._handoffs.items()
            if handoff.state in (SinkState.GRANTED, SinkState.STOPPING)
        )

    def describe(self) -> str:
        """A readable list of what is left."""
        lines = [str(request) for request in self.requests.values() if not request.outcome]
        for name, bench in self.workers.items():
            for each in bench.scheduler.sequences:
                lines.append(f"{name}: {each.key} {each.state} {each.block_table}")
            lines.append(f"{name}: {bench.scheduler.blocks.num_pinned} blocks are pinned")
        return "\n".join(lines)

    def close(self) -> None:
        """Close the workers' pipes."""
        for bench in self.workers.values():
            bench.close()
