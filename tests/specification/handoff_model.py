"""The specification of how prefill workers (P) and decode workers (D) share KV blocks: a model of
the protocol, and an explicit-state check of it.

    python -m tests.specification.handoff_model [--quick]

The code follows the rules `DESIGN` (see docs/handoff.md); change the model first. The check tries
everything that can happen in small fleets, breadth first. Messages take any time, and keep their
order between a P and a D. A worker admits its requests in any order. The request that it has chosen
as next (its head) holds up the others until it fits. So every order that routers, priorities or
grammars can cause is tried. Smaller requests that fit may pass a head; together they take at
most as many blocks as the head needs. Verdicts:

    safe    no write lands in blocks that D has taken back
    alive   from every state an end can be reached: all requests ended, all blocks free
    ends    no state comes twice, so every run reaches such an end
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, groupby, product
from typing import NamedTuple


@dataclass(frozen=True)
class Rules:
    """`asks`: D asks P, P says Begun once it holds all blocks of the prompt, and only then D
    reserves. Without it, D reserves in any order and grants at once."""

    asks: bool = True
    shares: bool = True  # prompts that one D has not granted hold at most a share of P's pool
    gives_back: bool = True  # D returns requests that do not fit beside the fences of a frozen P
    passes: bool = True  # requests that fit pass a head that does not, within a bound
    one_order: bool = False  # all workers admit in the order of the requests' names
    uncalled_head: bool = False  # wrong: a request that P has not begun may hold up others at D
    begun_too_soon: bool = False  # wrong: P says Begun for its head, before that has its blocks
    frees_unanswered: bool = False  # wrong: D takes back at once blocks without a reported write
    skips_landing: bool = False  # wrong: a fence falls as soon as P is dead
    forgets_waiting: bool = False  # wrong: P's death does not end requests that D has not granted
    head_is_worker: bool = False  # wrong: P is dead once its head is, whatever its other rank does
    posts_unleased: bool = False  # wrong: the other rank posts although its lease has ended
    closes_unposted: bool = False  # wrong: P closes while orders to its other rank are under way
    counts_blocks: bool = False  # wrong: a block has arrived once the piece of one rank has


DESIGN, EAGER = Rules(), Rules(asks=False, shares=False, passes=False)


class Request(NamedTuple):
    """Without a `source`, D computes the prompt alone. `departs`: the source is a D that
    drains, and has all blocks already."""

    source: str
    target: str
    size: int
    departs: bool = False


@dataclass(frozen=True)
class Fleet:
    """Pools, requests, and what may happen: aborts, one crash of any worker, a P that freezes."""

    pools: dict[str, int]
    requests: tuple[Request, ...]
    aborts: int = 0
    crashes: int = 0  # 1: any one worker may crash
    freezes: int = 0
    thaws: bool = False  # the frozen worker may go on
    grows: bool = False  # a running request needs one block more before it can end
    share: int = 0  # blocks of each P's pool for prompts that one D has not granted; 0: all
    full: str = ""  # a D that answers but never grants; requests of other Ds must still end
    ranks: int = 1  # of each source: 2, and each block has a piece of the head and one of the other


class Leg(NamedTuple):
    """One request: its state at both workers, and its messages and writes between them. The first
    token goes with the last block.

    `p`: "-" not arrived, w waits, h head, c has its blocks, s stops while writes fly, x over.
    `d`: w waits, h head, r granted; k waits and K head to compute alone; u runs, v runs with one
    block more; e over.
    """

    p: str = "-"
    d: str = "-"
    computed: int = 0
    ordered: int = 0  # writes that P's other rank was told to post and has not posted
    flying: int = 0  # writes that are posted and have not landed
    landed: int = 0
    knows: int = 0  # what P knows of D: 1 it asked, 2 it granted
    called: bool = False  # D has heard Begun
    fence: str = ""  # of an ended attempt's blocks: f until P answers, l for the landing time
    up: str = ""  # messages on the way to P: a Ask, g grant, b Abort
    down: str = ""  # messages on the way to D: B Begun, c closed
    passed_p: int = 0  # blocks of requests that passed it while it was P's head; D's: passed_d
    passed_d: int = 0
    abort_p: bool = False  # the router's abort is on the way to P; to D: abort_d
    abort_d: bool = False


class State(NamedTuple):
    legs: tuple[Leg, ...]
    aborts: int
    dead: str = ""  # its head has crashed; its other rank may go on
    is_all_dead: bool = False  # so it does not: it has ended, or its lease has
    frozen: str = ""


Move = tuple[tuple[str, int], State]  # the event, the number of its request, and the state after it
Change = tuple[str, Leg]  # the event at {p} or {d} of request {r}, and the leg after it


_SAID = {"a": "Ask", "g": "the grant of", "b": "Abort"}


class LateWrite(Exception):
    """A write has landed in blocks that D has taken back."""


class Model:
    """All moves of a fleet. `reduces` counts states that differ in names only once."""

    def __init__(self, fleet: Fleet, rules: Rules, reduces: bool = True) -> None:
        self.fleet, self.rules = fleet, rules
        self.requests = sorted(fleet.requests)
        alike = [len(list(same)) for _, same in groupby(self.requests)]
        self.kinds = alike if reduces and not rules.one_order else [1] * len(self.requests)

    def start(self) -> State:
        begun = {r: Leg("c", computed=r.size) for r in self.requests if r.departs}
        legs = [begun.get(r, Leg("-" if r.source else "x")) for r in self.requests]
        return State(tuple(legs), self.fleet.aborts)

    def is_end(self, state: State) -> bool:
        """Whether all requests are over, except those that a frozen P or a full D holds."""
        return all(
            leg == Leg("x", "e")
            or (leg.d == "e" and request.source == state.frozen != "")
            or request.target == self.fleet.full
            for request, leg in self.pairs(state)
        )

    def exceeds_share(self, request: Request, state: State) -> bool:
        """Whether this request would exceed its D's share of P's pool."""
        same = [
            each.size
            for each, leg in self.pairs(state)
            if each[:2] == request[:2] and leg.p in "cs" and leg.knows < 2
        ]
        limit = self.fleet.share if self.rules.shares else 0
        return bool(limit and same) and sum(same) + request.size > limit

    def moves(self, state: State) -> Iterator[Move]:
        """What can happen next, and to which request. Raises LateWrite."""
        pairs = self.pairs(state)
        free, room = self.free_blocks(state)
        heads = {request.source for request, leg in pairs if leg.p == "h"}
        heads |= {request.target for request, leg in pairs if leg.d in "hK"}
        for i, (request, leg) in enumerate(pairs):
            source, target, size, _ = request
            leads_p, leads_d = source not in heads, target not in heads
            if self.rules.one_order:
                leads_p &= all(r.source != source or each.p in "csx" for r, each in pairs[:i])
                leads_d &= all(r.target != target or each.d in "ruve" for r, each in pairs[:i])
            may_begin = leg.p == "h" or not self.exceeds_share(request, state)
            changes: list[Change] = []
            if source and source not in (state.dead, state.frozen):
                changes += self.at_source(leg, size, free[source], leads_p and may_begin)
            if source != state.frozen:
                changes += self.on_the_way(leg, size, state.dead == target, state.dead == source)
            if target == self.fleet.full:
                changes += self.at_target(leg, request, 0, False)
            elif target != state.dead:
                changes += self.at_target(leg, request, free[target], leads_d)
                if source:
                    is_dead = state.dead == source and self.counts_as_dead(state)
                    changes += self.on_trouble(leg, is_dead, state.frozen == source)
            if leg.d in "whkK" and self.rules.gives_back and room[target] < size:
                changes.append(("{d} gives {r} back: no room", self.give_up(leg, "e")))
            for text, changed in changes:
                yield (text, i), self.put(state, {i: changed})
            yield from self.passing(state, i, free)
            if leg.d == "u" and self.fleet.grows and not free[target]:
                yield from self.preemptions(state, target)
            if state.aborts and leg.d != "e" and not leg.abort_d:
                gone = leg._replace(abort_d=True, abort_p=leg.p != "x")
                fewer = state._replace(aborts=state.aborts - 1)
                yield ("the client of {r} goes away", i), self.put(fewer, {i: gone})
        yield from self.mishaps(state)

    def counts_as_dead(self, state: State) -> bool:
        """Whether D takes a worker whose head has crashed for dead."""
        return self.fleet.ranks == 1 or state.is_all_dead or self.rules.head_is_worker

    def pairs(self, state: State) -> list[tuple[Request, Leg]]:
        return list(zip(self.requests, state.legs, strict=True))

    def free_blocks(self, state: State) -> tuple[dict[str, int], dict[str, int]]:
        """Of each pool, the blocks that are free now, and all but those fenced for a frozen P."""
        free, room = dict(self.fleet.pools), dict(self.fleet.pools)
        for (source, target, size, _), leg in self.pairs(state):
            if leg.p in "cs" and source != state.dead:
                free[source] -= size
            if target != state.dead:
                free[target] -= size * (leg.d in "ruv") + (leg.d == "v") + size * bool(leg.fence)
                room[target] -= size * bool(leg.fence and source == state.frozen)
        assert min(free.values()) >= 0, state
        return free, room

    def passing(self, state: State, i: int, free: dict[str, int]) -> Iterator[Move]:
        """{r} passes a head that does not fit."""
        if self.rules.passes and not self.exceeds_share(self.requests[i], state):
            yield from self.passing_at_source(state, i, free)
        if self.rules.passes:
            yield from self.passing_at_target(state, i, free)

    def passing_at_source(self, state: State, i: int, free: dict[str, int]) -> Iterator[Move]:
        """{r} passes the head of P, which does not fit."""
        (source, _, size, _), leg = self.requests[i], state.legs[i]
        if leg.p != "w" or source in (state.dead, state.frozen) or free[source] < size:
            return
        for j, (other, head) in enumerate(self.pairs(state)):
            fits = other.size <= free.get(other.source, 0)
            if other.source != source or head.p != "h" or fits:
                continue
            if head.passed_p + size <= other.size:
                admitted = leg._replace(p="c", down=leg.down + "B" * (leg.knows == 1))
                passed = head._replace(passed_p=head.passed_p + size)
                yield (
                    ("{p} admits {r}, past its head", i),
                    self.put(state, {i: admitted, j: passed}),
                )

    def passing_at_target(self, state: State, i: int, free: dict[str, int]) -> Iterator[Move]:
        """{r} passes the head of D, which does not fit."""
        (_, target, size, _), leg = self.requests[i], state.legs[i]
        may = leg.d == "k" or (leg.d == "w" and leg.called)
        if not may or target in (state.dead, self.fleet.full) or free[target] < size:
            return
        for j, (other, head) in enumerate(self.pairs(state)):
            if other.target != target or head.d not in "hK" or other.size <= free[target]:
                continue
            if head.passed_d + size <= other.size:
                admitted = leg._replace(d="u")
                if leg.d == "w":
                    admitted = leg._replace(d="r", up=leg.up + "g", called=False)
                passed = head._replace(passed_d=head.passed_d + size)
                yield (
                    ("{d} admits {r}, past its head", i),
                    self.put(state, {i: admitted, j: passed}),
                )

    def preemptions(self, state: State, target: str) -> Iterator[Move]:
        """Any running request may be preempted."""
        for j, (other, each) in enumerate(self.pairs(state)):
            if other.target == target and each.d in "uv":
                yield ("{d} preempts {r}", j), self.put(state, {j: each._replace(d="k")})

    def mishaps(self, state: State) -> Iterator[Move]:
        """Crashes and freezes."""
        fleet = self.fleet
        for pool in fleet.pools if fleet.crashes and not state.dead else ():
            yield (f"{pool} crashes", 0), self.crash(state, pool)
        if state.dead and fleet.ranks > 1 and not state.is_all_dead:
            yield (f"the other rank of {state.dead} is gone", 0), self.lose_other_rank(state)
        for pool in fleet.pools if fleet.freezes and not state.frozen else ():
            if pool.startswith("P"):
                yield (f"{pool} freezes", 0), state._replace(frozen=pool)
        if state.frozen and fleet.thaws:
            yield (f"{state.frozen} goes on", 0), state._replace(frozen="")

    def put(self, state: State, changed: dict[int, Leg]) -> State:
        """The state after a change, in a normal form: fields that no longer matter are reset, and
        equal requests are sorted."""
        legs = [changed.get(i, leg) for i, leg in enumerate(state.legs)]
        for i, leg in enumerate(legs):
            is_quiet = not leg.ordered and not leg.flying
            if leg.p == "x" and leg.d in "uvkKe" and is_quiet and not leg.fence:
                legs[i] = Leg("x", leg.d, abort_d=leg.abort_d and leg.d != "e")
                legs[i] = legs[i]._replace(passed_d=leg.passed_d)
            if leg.p != "h" and leg.passed_p:
                legs[i] = legs[i]._replace(passed_p=0)
            if leg.d not in "hK" and leg.passed_d:
                legs[i] = legs[i]._replace(passed_d=0)
        ordered: list[Leg] = []
        for count in self.kinds:
            ordered += sorted(legs[len(ordered) : len(ordered) + count])
        return state._replace(legs=tuple(ordered))

    def crash(self, state: State, pool: str) -> State:
        """A dead source posts and sends no more; the router aborts a dead target's requests."""
        legs = {}
        for i, (request, leg) in enumerate(self.pairs(state)):
            if request.source == pool:
                leg = leg._replace(p="x", knows=0, up="", abort_p=False)
            if request.target == pool:
                leg = leg._replace(d="e", called=False, fence="", down="", abort_d=False)
                leg = leg._replace(abort_p=leg.p not in "xs")
            legs[i] = leg
        return self.put(state._replace(dead=pool), legs)

    def lose_other_rank(self, state: State) -> State:
        """The other rank of the dead worker posts nothing more."""
        legs = {
            i: leg._replace(ordered=0)
            for i, (request, leg) in enumerate(self.pairs(state))
            if request.source == state.dead and not self.rules.posts_unleased
        }
        return self.put(state._replace(is_all_dead=True), legs)

    def at_source(self, leg: Leg, size: int, free: int, may_lead: bool) -> Iterator[Change]:
        """A prefill worker, or a decode worker that drains."""
        if leg.p == "-":
            yield "{p} receives Prefill {r}", leg._replace(p="w")
        elif leg.p in "wh" and free >= size and (leg.p == "h" or may_lead):
            says = " and says Begun" * (leg.knows == 1)
            yield "{p} admits {r}" + says, leg._replace(p="c", down=leg.down + "B" * bool(says))
        elif leg.p == "w" and free < size and may_lead:
            says = ", but says Begun" * bool(leg.knows and self.rules.begun_too_soon)
            head = leg._replace(p="h", down=leg.down + "B" * bool(says))
            yield "{p} takes {r} as next; it has no room" + says, head
        elif leg.p == "c" and leg.computed < size:
            posts = leg.knows == 2
            more = self.post(leg._replace(computed=leg.computed + 1), int(posts))
            yield "{p} computes a block of {r}" + " and writes it" * posts, more
        if leg.up:
            yield self.hear(leg._replace(up=leg.up[1:]), leg.up[0])
        if leg.abort_p and leg.p != "-":
            yield "{p} hears that {r} is unwanted", self.stop(leg._replace(abort_p=False))

    def hear(self, leg: Leg, message: str) -> Change:
        """P reads a message of D. For a closed handoff it answers again."""
        text = f"{{p}} receives {_SAID[message]} {{r}}"
        known = leg._replace(knows=leg.knows or 1)
        if leg.p in "sx":
            return text, known._replace(down=leg.down + "c" * (leg.p == "x"))
        if message == "b":
            return text, self.stop(known)
        if message == "g":  # what is computed already leaves now
            return text, self.post(leg._replace(knows=2), leg.computed)
        says = leg.p == "c" or (leg.p == "h" and self.rules.begun_too_soon)
        return text + " and says Begun" * says, known._replace(down=leg.down + "B" * says)

    def post(self, leg: Leg, blocks: int) -> Leg:
        """The head posts its pieces of some blocks, and tells the other rank to post its own."""
        ordered = leg.ordered + blocks * (self.fleet.ranks - 1)
        return leg._replace(ordered=ordered, flying=leg.flying + blocks)

    def stop(self, leg: Leg) -> Leg:
        """Post nothing more; close when nothing is under way."""
        closed = leg._replace(p="x", down=leg.down + "c" * (leg.p != "x" and leg.knows > 0))
        waits = leg.flying or (leg.ordered and not self.rules.closes_unposted)
        return leg._replace(p="s") if waits and leg.p != "x" else closed

    def at_other_rank(self, leg: Leg) -> Iterator[Change]:
        """The other rank posts a write, or finds that its order has come too late."""
        fewer = leg._replace(ordered=leg.ordered - 1)
        yield "the other rank of {p} posts a write of {r}", fewer._replace(flying=leg.flying + 1)
        if leg.p == "s":
            yield "the other rank of {p} drops a write of {r}", self.stop(fewer)

    def on_the_way(self, leg: Leg, size: int, to_dead: bool, of_dead: bool) -> Iterator[Change]:
        """Writes that were ordered or posted."""
        if leg.ordered:
            yield from self.at_other_rank(leg)
        if leg.flying:
            yield from self.in_flight(leg, size, to_dead, of_dead)

    def in_flight(self, leg: Leg, size: int, to_dead: bool, of_dead: bool) -> Iterator[Change]:
        """A write lands, and D learns of it. A write from or to a dead worker may be lost."""
        fewer = leg._replace(flying=leg.flying - 1)
        if to_dead or of_dead:
            yield "a write of {r} is lost", self.stop(fewer) if leg.p == "s" else fewer
        if not to_dead and leg.d != "r" and not leg.fence:
            raise LateWrite
        pieces = size if self.rules.counts_blocks else size * self.fleet.ranks
        if not to_dead and leg.landed + 1 == pieces:  # complete: both sides let go
            runs = "u" if leg.d == "r" else leg.d
            yield "the last write of {r} lands", fewer._replace(p="x", d=runs, fence="")
        elif not to_dead:
            fewer = fewer._replace(landed=leg.landed + 1)
            yield "a write of {r} lands", self.stop(fewer) if leg.p == "s" else fewer

    def at_target(self, leg: Leg, request: Request, free: int, may_lead: bool) -> Iterator[Change]:
        rules, fits = self.rules, free >= request.size
        is_called = leg.called or not rules.asks
        if leg.d == "-":
            asks = bool(rules.asks and request.source)
            arrived = leg._replace(d="w" if request.source else "k", up="a" * asks)
            yield "{d} receives Generate {r}" + " and sends Ask" * asks, arrived
        elif leg.d in "wh" and is_called and fits and (leg.d == "h" or may_lead):
            granted = leg._replace(d="r", up=leg.up + "g", called=False)
            yield "{d} reserves blocks for {r} and grants them", granted
        elif leg.d in "kK" and fits and (leg.d == "K" or may_lead):
            yield "{d} computes {r} alone", leg._replace(d="u")
        elif may_lead and (leg.d == "k" or (leg.d == "w" and (is_called or rules.uncalled_head))):
            head = leg._replace(d="h" if leg.d == "w" else "K")
            yield "{d} takes {r} as next; it has to wait", head
        elif leg.d == "v" or (leg.d == "u" and not self.fleet.grows):
            yield "{d} ends {r}", leg._replace(d="e")
        elif leg.d == "u" and free:
            yield "{d} lets {r} grow", leg._replace(d="v")
        if leg.down:
            has_begun, rest = leg.down[0] == "B", leg._replace(down=leg.down[1:])
            ended = rest._replace(d="e" if leg.d in "whr" else leg.d, fence="")
            news = rest._replace(called=leg.d in "wh") if has_begun else ended
            yield "{d} hears that {r} " + ("has begun" if has_begun else "is closed"), news
        if leg.abort_d and leg.d != "-":
            yield "{d} hears that {r} is unwanted", self.give_up(leg._replace(abort_d=False), "e")

    def give_up(self, leg: Leg, then: str) -> Leg:
        """The attempt ends; granted blocks stay behind a fence until P answers."""
        if leg.d == "r":
            fence = "" if self.rules.frees_unanswered and not leg.landed else "f"
            return leg._replace(d=then, fence=fence, up=leg.up + "b")
        tells = "b" if leg.d in "wh" and self.rules.asks else ""
        return leg._replace(d=then, called=False, up=leg.up + tells)

    def on_trouble(self, leg: Leg, is_dead: bool, is_frozen: bool) -> Iterator[Change]:
        """D notices that P is dead or frozen; the next attempt computes the prompt at D."""
        if is_dead and (leg.d == "r" or (leg.d in "wh" and not self.rules.forgets_waiting)):
            again = leg._replace(d="k", fence="l" if leg.d == "r" else "", called=False)
            yield "{d} gives {r} up, {p} is gone; {d} is to compute it alone", again
        elif is_dead and leg.fence == "f":
            yield "{d} sees that {p} is gone", leg._replace(fence="l")
        elif is_dead and leg.fence and (not leg.flying or self.rules.skips_landing):
            yield "{d} lifts the fence of {r}", leg._replace(fence="")
        if is_frozen and leg.d in "whr":
            text = "{d} gives {r} up, {p} is silent; {d} is to compute it alone"
            yield text, self.give_up(leg, "k")


def _before(states: list[int], before: list[list[int]]) -> set[int]:
    """These states, and all from which one of them can be reached."""
    seen = set(states)
    for here in states:  # it grows meanwhile, backwards
        states += {each for each in before[here] if each not in seen}
        seen.update(before[here])
    return seen


def check(fleet: Fleet, rules: Rules, reduces: bool = True) -> tuple[str, int, list[str]]:
    """Verdict, number of states, and a shortest trace of what is wrong."""
    model = Model(fleet, rules, reduces)
    states, ids = [model.start()], {model.start(): 0}
    came: list[tuple[int, tuple[str, int]]] = [(0, ("", 0))]  # from which state, by what
    before: list[list[int]] = [[]]
    num_next: list[int] = []  # of moves, by state

    def trace(here: int) -> list[str]:
        texts = []
        while here:
            here, (text, i) = came[here]
            source, target = model.requests[i][:2]
            texts.append(text.format(r="ABCDEFG"[i], p=source, d=target))
        return texts[::-1]

    for here, state in enumerate(states):  # they get more meanwhile
        num_next.append(0)
        try:
            for what, after in model.moves(state):
                there = ids.setdefault(after, len(states))
                if there == len(states):
                    states.append(after)
                    came.append((here, what))
                    before.append([])
                before[there].append(here)
                num_next[here] += 1
        except LateWrite:
            return "LATE WRITE", len(states), [*trace(here), "a write lands where it may not"]
    last = [i for i, number in enumerate(num_next) if not number]
    if stuck := [here for here in last if not model.is_end(states[here])]:
        return "DEADLOCK", len(states), trace(stuck[0])
    seen = _before([i for i, state in enumerate(states) if model.is_end(state)], before)
    if len(seen) < len(states):
        return "NO WAY OUT", len(states), trace(min(set(range(len(states))) - seen))
    for here in last:  # it grows, too: by states after which only such ones come
        for each in before[here]:
            num_next[each] -= 1
            if not num_next[each]:
                last.append(each)
    return "safe, alive" + ", ends" * (len(last) == len(states)), len(states), []


def mixes(pools: str, counts: str, sizes: str, **more: object) -> list[Fleet]:
    """Every mix of requests; of those that differ in names of equal workers only, one."""
    if "," in pools:
        return [fleet for each in pools.split(",") for fleet in mixes(each, counts, sizes, **more)]
    room = {each[:-2]: int(each[-1]) for each in pools.split()}
    pairs = [(p, d, min(room[p], room[d])) for p in room for d in room if p[0] + d[0] == "PD"]
    kinds = [Request(p, d, int(n)) for p, d, most in pairs for n in sizes if int(n) <= most]
    swaps, kept = list(product(({}, str.maketrans("01", "10")), repeat=2)), set()
    for mix in (mix for n in counts for mix in combinations_with_replacement(kinds, int(n))):
        same = [[(p.translate(a), d.translate(b), n) for p, d, n, _ in mix] for a, b in swaps]
        kept.add(tuple(Request(*each) for each in min(map(sorted, same))))
    return [Fleet(room, mix, **more) for mix in sorted(kept)]


DEAD, LATE, ALIVE, ENDS = "DEADLOCK", "LATE", "safe, alive", "safe, alive, ends"
TWO, P2, D2, ALL2 = "P=2 D=2", "P0=2 P1=2 D=2", "P=2 D0=2 D1=2", "P0=2 P1=2 D0=2 D1=2"
Row = tuple[str, Rules, str, list[Fleet]]  # a name, rules, how each verdict must begin, fleets


def report(name: str, rules: Rules, wanted: str, fleets: list[Fleet]) -> bool:
    """Check, and print how it went; of a single fleet the trace, too. True if it is as wanted."""
    began, verdicts, states = time.monotonic(), Counter(), 0
    for fleet in fleets:
        verdict, number, trace = check(fleet, rules, reduces=len(fleets) > 1)
        verdicts[verdict], states = verdicts[verdict] + 1, states + number
    told = ", ".join(f"{number} {verdict}" for verdict, number in sorted(verdicts.items()))
    print(f"{name:<43}{states:>10,} states {time.monotonic() - began:5.1f} s  {told}", flush=True)
    for i, text in enumerate(trace if len(fleets) == 1 else [], 1):
        print(f"      {i:2} {text}")
    return all(verdict.startswith(wanted) for verdict in verdicts)


def rows(is_quick: bool) -> list[Row]:
    """What to check. The quick ones are the rules that are wrong on purpose and the smaller
    fleets."""
    quick = [*_wrong_rows(), *_small_rows()]
    return quick if is_quick else [*quick, *_eager_rows(), *_large_rows(), *_mishap_rows()]


def _beside() -> Fleet:
    """D0 is full, and most of the prompts of P are for it."""
    busy = (Request("P", "D0", 1), Request("P", "D0", 1), Request("P", "D1", 1))
    return Fleet({"P": 2, "D0": 1, "D1": 1}, busy, share=1, full="D0")


def _beside_drain(fleets: list[Fleet]) -> list[Fleet]:
    """Each with a request that D0 hands over to D1."""
    out = Request("D0", "D1", 2, True)
    return [Fleet(fleet.pools | {"D0": 2}, (out, *fleet.requests)) for fleet in fleets]


def _beside_local(fleets: list[Fleet]) -> list[Fleet]:
    """Each with a prompt that D computes alone."""
    alone = Request("", "D", 2)
    return [replace(fleet, requests=(*fleet.requests, alone)) for fleet in fleets]


def _wrong_rows() -> list[Row]:
    """Rules that are wrong on purpose."""
    r = Request
    pair = Fleet({"P": 2, "D": 2}, (r("P", "D", 1), r("P", "D", 2)))
    split = replace(pair, ranks=2)
    cold = Fleet({"P0": 2, "P1": 2, "D": 2}, (r("P0", "D", 1), r("P1", "D", 2)), freezes=1)
    ring = Fleet({"D0": 2, "D1": 2}, (r("D0", "D1", 2, True), r("D1", "D0", 2, True)))
    return [
        ("eager, 1P1D, pools of 1", EAGER, DEAD, mixes("P=1 D=1", "2", "1")),
        ("wrong: uncalled_head", Rules(uncalled_head=True), DEAD, [pair]),
        ("wrong: begun_too_soon", Rules(begun_too_soon=True), DEAD, [pair]),
        ("wrong: frees_unanswered", Rules(frees_unanswered=True), LATE, [replace(pair, aborts=1)]),
        ("wrong: skips_landing", Rules(skips_landing=True), LATE, [replace(pair, crashes=1)]),
        ("wrong: forgets_waiting", Rules(forgets_waiting=True), DEAD, [replace(pair, crashes=1)]),
        ("wrong: head_is_worker", Rules(head_is_worker=True), LATE, [replace(split, crashes=1)]),
        ("wrong: posts_unleased", Rules(posts_unleased=True), LATE, [replace(split, crashes=1)]),
        ("wrong: closes_unposted", Rules(closes_unposted=True), LATE, [replace(split, aborts=1)]),
        ("wrong: counts_blocks", Rules(counts_blocks=True), LATE, [split]),
        ("wrong: gives nothing back", Rules(gives_back=False), DEAD, [cold]),
        ("wrong: no share, D0 is full", Rules(shares=False), DEAD, [_beside()]),
        ("wrong: D drain in a ring", DESIGN, DEAD, [ring]),
    ]


def _small_rows() -> list[Row]:
    """The design in the smaller fleets."""
    drains, locals_ = mixes("P=2 D1=2", "2", "12"), mixes(TWO, "2", "12")
    return [
        ("1P1D, 2 and 3 prompts", DESIGN, ENDS, mixes(TWO, "23", "12")),
        ("2P1D, 1P2D, 2 prompts", DESIGN, ENDS, mixes(f"{P2},{D2}", "2", "12")),
        ("shares, beside a full D0", DESIGN, ENDS, [_beside()]),
        ("an abort, 1P1D, 2 prompts", DESIGN, ENDS, mixes(TWO, "2", "12", aborts=1)),
        ("a crash, 1P1D, 2 prompts", DESIGN, ENDS, mixes(TWO, "2", "12", crashes=1)),
        ("two ranks, an abort, 1P1D", DESIGN, ENDS, mixes(TWO, "12", "12", aborts=1, ranks=2)),
        ("two ranks, a crash, 1P1D", DESIGN, ENDS, mixes(TWO, "12", "12", crashes=1, ranks=2)),
        ("a P freezes, 2P1D, 2 prompts", DESIGN, ENDS, mixes(P2, "2", "2", freezes=1)),
        ("beside a request that drains, 2 prompts", DESIGN, ENDS, _beside_drain(drains)),
        ("beside a prompt that D computes alone", DESIGN, ENDS, _beside_local(locals_)),
    ]


def _eager_rows() -> list[Row]:
    """Rules under which D reserves before P has begun."""
    ordered = replace(EAGER, one_order=True)
    every = f"P=3 D=3,{P2},{D2},{ALL2}"
    return [
        ("eager, all in one order", ordered, ENDS, mixes(TWO, "234", "12")),
        ("eager, 1P1D to 2P2D", EAGER, "", mixes(every, "3", "123")),
    ]


def _large_rows() -> list[Row]:
    """The design in the larger fleets."""
    drains, locals_ = mixes("P=2 D1=2", "23", "12"), mixes(TWO, "23", "12")
    square = [f for f in mixes(ALL2, "4", "2") if len(set(f.requests)) == 4]
    beside = mixes("P=4 D0=2 D1=2", "34", "12", share=2, full="D0")
    return [
        ("1P1D, 2-4 prompts", DESIGN, ENDS, mixes(f"{TWO},P=2 D=4,P=4 D=2,P=3 D=3", "234", "12")),
        ("1P1D, 2 and 3 prompts of 1 to 3", DESIGN, ENDS, mixes("P=3 D=3,P=4 D=4", "23", "123")),
        ("2P1D", DESIGN, ENDS, mixes(P2, "23", "12") + mixes("P0=3 P1=3 D=3", "3", "123")),
        ("1P2D", DESIGN, ENDS, mixes(D2, "23", "12") + mixes("P=3 D0=3 D1=3", "3", "123")),
        ("2P2D", DESIGN, ENDS, mixes(ALL2, "23", "12")),
        ("2P2D, four prompts, one for each pair", DESIGN, ENDS, square),
        ("shares, 1P2D, 3 prompts", DESIGN, ENDS, mixes(D2, "3", "12", share=1)),
        ("shares, 1P2D", DESIGN, ENDS, mixes("P=3 D0=3 D1=3,P=4 D0=2 D1=2", "3", "12", share=2)),
        ("shares, beside a full D0", DESIGN, ENDS, beside),
        ("beside a prompt that D computes alone", DESIGN, ENDS, _beside_local(locals_)),
        ("beside a request that drains, D0 to D1", DESIGN, ENDS, _beside_drain(drains)),
    ]


def _mishap_rows() -> list[Row]:
    """The design with aborts, crashes, freezes and preemption."""
    split = mixes(f"{P2},{D2}", "2", "12", crashes=1, ranks=2)
    alone = mixes(TWO, "12", "12", crashes=1, ranks=2)
    return [
        ("an abort, 1P1D", DESIGN, ENDS, mixes(TWO, "23", "12", aborts=1)),
        ("an abort, shares, 1P2D", DESIGN, ENDS, mixes(D2, "3", "1", aborts=1, share=1)),
        ("two aborts, 2P2D", DESIGN, ENDS, mixes(ALL2, "2", "12", aborts=2)),
        ("a crash, 1P1D", DESIGN, ENDS, mixes(TWO, "23", "12", crashes=1)),
        ("a crash, 2P1D, 1P2D", DESIGN, ENDS, mixes(f"{P2},{D2}", "3", "2", crashes=1)),
        ("a crash, shares, 1P2D", DESIGN, ENDS, mixes(D2, "3", "1", crashes=1, share=1)),
        ("two ranks, a crash, 2P1D, 1P2D", DESIGN, ENDS, split),
        ("two ranks, a crash and an abort", DESIGN, ENDS, [replace(f, aborts=1) for f in alone]),
        ("two ranks, a P freezes, 2P1D", DESIGN, ENDS, mixes(P2, "2", "2", freezes=1, ranks=2)),
        ("a crash and an abort", DESIGN, ENDS, mixes(TWO, "2", "12", aborts=1, crashes=1)),
        ("a P freezes, 2P1D", DESIGN, ENDS, mixes(P2, "23", "2", freezes=1)),
        ("a P freezes and goes on", DESIGN, ALIVE, mixes(P2, "2", "12", freezes=1, thaws=True)),
        ("preemption", DESIGN, ALIVE, mixes("P=2 D=3", "234", "12", grows=True)),
    ]


def main(argv: list[str]) -> int:
    """Check every row; 0 if all are as they must be."""
    failed = [row[0] for row in rows("--quick" in argv) if not report(*row)]
    print("not as it must be: " + ", ".join(failed) if failed else "all as it must be")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
