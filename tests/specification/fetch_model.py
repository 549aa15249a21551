"""The specification of fetches: a model in which any worker may be a source and a sink of KV.

    python -m tests.specification.fetch_model [--quick | --long] [--traces]

It stands beside `handoff_model.py` and keeps its rules for the handoff from the worker that
computes a prompt (C) to the decode worker that continues it (D): D asks, C says Begun, D grants.
Fetches are new here: C may get the leading blocks of a prompt from a holder (H) that has them
cached. C allocates all blocks of the prompt, then grants some of them to H in one message. H
matches its cache, pins what it finds, writes, and closes, with the number of blocks. C says Begun
only after its fetch.

Everything that can happen in small fleets is tried, breadth first: any order of admission, messages
and writes that take any time, eviction at any time, giving up at any moment, clients that go away,
a crash, a worker that freezes (and perhaps continues), and links that break, whose messages and
writes are lost or arrive much later. Verdicts: "safe": no write lands in a block that was given
back or is computed into, and no block is used without its data; "alive": from every state an end is
reachable, with all requests over and no block used, pinned or fenced; "ends": no state comes twice.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, groupby
from typing import NamedTuple


@dataclass(frozen=True)
class Rules:
    """The design, and rules that are wrong on purpose."""

    gives_up: bool = True  # a fetch has a deadline; a source that does not answer is left alone
    gives_back: bool = True  # requests that do not fit beside blocks a frozen worker may write to
    eager: bool = False  # wrong: D reserves and grants before C has begun
    begun_at_admission: bool = False  # wrong: C says Begun before its fetch is over
    fetch_first: bool = False  # wrong: C allocates for the fetch, and later for the rest
    pins_when_asked: bool = False  # wrong: H pins when asked; C allocates and grants afterwards
    pins_until_told: bool = False  # wrong: H unpins when C says so
    promises: bool = False  # wrong: H lets C wait for blocks that H is computing
    no_fence: bool = False  # wrong: blocks granted to H come back at once when unwanted
    unheard_is_free: bool = False  # wrong: the same, if H has not written anything yet
    skips_landing: bool = False  # wrong: the fence falls as soon as H is dead
    ignores_error: bool = False  # wrong: H closed with an error: the fence falls at once
    computes_in_fence: bool = False  # wrong: C computes into granted blocks when it gives up
    forgets_unknown: bool = False  # wrong: H serves a fetch although its abort came first
    trusts_hint: bool = False  # wrong: H writes the hinted blocks without looking them up
    no_pin: bool = False  # wrong: H looks the blocks up, but does not pin them
    ignores_count: bool = False  # wrong: C treats all granted blocks as arrived
    keeps_rest: bool = False  # wrong: a request that waits again keeps its other blocks
    takes_and_waits: bool = False  # wrong: a taker holds a part while it waits for more room


DESIGN = Rules()


class Request(NamedTuple):
    """`at` computes `size` blocks; `to` continues, or `at` alone ("" ). `holder` has cached the
    first `held` of them, `second` the first `more`. `departs`: `at` drains and has all blocks.
    `takes`: no request, but a prefix in the cache of `holder`, which drains: `at` takes `held`
    blocks over, if it has room, and computes nothing."""

    at: str
    to: str = ""
    size: int = 2
    holder: str = ""
    held: int = 0
    second: str = ""
    more: int = 0
    chain: str = ""  # requests with the same chain share a prefix; "": with none
    departs: bool = False
    takes: bool = False


@dataclass(frozen=True)
class Fleet:
    """Pools, requests, and how often each mishap may happen."""

    pools: dict[str, int]
    requests: tuple[Request, ...]
    aborts: int = 0
    crashes: int = 0  # 0 or 1
    freezes: int = 0  # 0 or 1
    thaws: bool = False
    breaks: int = 0  # of links between a sink and its source
    fails: int = 0  # writes of a fetch that fail while both live
    evicts: bool = True  # caches may evict at any time
    freezable: str = ""  # only this worker; "": any


class Fetch(NamedTuple):
    """Some blocks that C granted to a holder."""

    nth: int = 0  # 0: `holder`, 1: `second`
    first: int = 0
    asked: int = 0
    # o granted; a told to stop; l lost, writes may land; x no fence; ?, ! (pins_when_asked)
    sink: str = "o"
    src: str = "-"  # - unknown; w pinned, writes; k kept; p promised; x closed
    left: int = 0  # pinned, to be posted
    flying: int = 0
    landed: int = 0
    up: str = ""  # F fetch, b abort, r renewal; A, G: ask and grant, u: unpin (wrong rules)
    down: str = ""  # c closed; e closed with an error; B (wrong rule)
    old: str = ""  # sent on a link that broke; may still arrive, in any order
    lost: bool = False  # something was lost, so a repetition is due


class Leg(NamedTuple):
    """One request at all its workers, and between."""

    c: str = "-"  # not there; w waits, h head; f fetches; c has its blocks; s stops; x over
    # only under wrong rules: q has fetched and wants the rest, n wants new blocks
    have: int = 0  # leading blocks that were fetched
    computed: int = 0
    d: str = "-"  # w, h wait for C; r granted; k, K: to compute alone; u runs; e over
    flying: int = 0
    landed: int = 0
    knows: int = 0  # what C knows of D: 1 it asked, 2 it granted
    called: bool = False
    fence: str = ""  # of D, around blocks of an ended attempt: f until C answers, l landing time
    up: str = ""
    down: str = ""
    abort_c: bool = False
    abort_d: bool = False
    stock: int = 0  # leading blocks that `holder` has cached
    stock2: int = 0
    fetches: tuple[Fetch, ...] = ()


class Mood(NamedTuple):
    """What is true of the whole fleet: mishaps that may still happen, and those that have."""

    aborts: int = 0
    breaks: int = 0
    fails: int = 0
    crashes: int = 0
    freezes: int = 0
    dead: str = ""
    frozen: str = ""


State = tuple[int, ...]  # the number of each leg, then that of the mood


class Context(NamedTuple):
    """The state of the fleet on which a request's moves depend."""

    leads_c: bool  # C has no head; leads_d: D has none
    leads_d: bool
    free_c: int  # at most the request's size
    free_d: int
    tight_c: bool  # too little room beside blocks that a frozen worker may write to
    tight_d: bool
    promised: bool  # a holder is computing the same prefix
    follows: bool  # C is fetching the same prefix for another request
    mood: Mood


class Wrong(Exception):
    """A write landed in a wrong block, or blocks are used without their data."""


class Change(NamedTuple):
    """An event, and the leg after it. It takes `number` blocks of `pool`; `spends` names the mishap
    whose remaining number falls by one."""

    text: str
    leg: Leg
    pool: str = ""
    number: int = 0
    spends: str = ""


class Model:
    """All moves of a fleet. Legs and moods are numbered; the moves of a leg are computed once."""

    def __init__(self, fleet: Fleet, rules: Rules, reduces: bool = True) -> None:
        self.fleet, self.rules = fleet, rules
        self.requests = sorted(fleet.requests)
        alike = [len(list(same)) for _, same in groupby(self.requests)]
        self.kinds = alike if reduces and max(alike) > 1 else []
        self.pools = list(fleet.pools)
        self.legs: list[Leg] = []
        self.moods: list[Mood] = []
        self._numbers: dict[Leg | Mood, int] = {}
        self._changes: dict[tuple[object, ...], list[tuple[str, int, str, int, str]] | Wrong] = {}
        self._weights: dict[tuple[int, int, int], tuple[list[int], list[int], list[int], int]] = {}

    def number(self, what: Leg | Mood) -> int:
        found = self._numbers.get(what)
        if found is None:
            table: list[Leg] | list[Mood] = self.legs if isinstance(what, Leg) else self.moods
            found = self._numbers[what] = len(table)
            table.append(what)  # type: ignore[arg-type]
        return found

    def start(self) -> State:
        """Caches hold what hints say, as far as it fits beside requests that are to depart."""
        fleet, legs = self.fleet, []
        room = dict(fleet.pools)
        for r in self.requests:
            room[r.at] -= r.size * r.departs
        for r in self.requests:
            stock = min(r.held, room.get(r.holder, 0))
            room[r.holder] = room.get(r.holder, 0) - stock
            stock2 = min(r.more, room.get(r.second, 0))
            room[r.second] = room.get(r.second, 0) - stock2
            leg = Leg(d="-" if r.to else "e", stock=stock, stock2=stock2)
            legs.append(leg._replace(c="c", computed=r.size) if r.departs else leg)
        mood = Mood(fleet.aborts, fleet.breaks, fleet.fails, fleet.crashes, fleet.freezes)
        return self.sorted([self.number(leg) for leg in legs], self.number(mood))

    def sorted(self, legs: list[int], mood: int) -> State:
        """Equal states look equal: equal requests are sorted."""
        place = 0
        for count in self.kinds:
            if count > 1:
                legs[place : place + count] = sorted(legs[place : place + count])
            place += count
        return (*legs, mood)

    def show(self, state: State) -> str:
        return " | ".join([*(str(self.legs[i]) for i in state[:-1]), str(self.moods[state[-1]])])

    def is_end(self, state: State) -> bool:
        """Everything is over; what a frozen worker has or may write to is excused."""
        mood = self.moods[state[-1]]
        cold = mood.frozen
        for r, number in zip(self.requests, state, strict=False):
            leg = self.legs[number]
            if (leg.c != "x" and r.at != cold) or (leg.d != "e" and r.to != cold):
                return False
            if leg.fence and cold not in (r.at, r.to):
                return False
            for f in leg.fetches:
                h = holder(r, f)
                if f.sink != "x" and (not cold or cold not in (h, r.at)):
                    return False
                if f.src in "wkp" and h not in (cold, mood.dead):
                    return False
                if f.flying and h != cold:
                    return False
        return True

    # -- memory ------------------------------------------------------------------------------

    def pinned(self, leg: Leg, nth: int) -> int:
        """Leading blocks of the chain that fetches keep from being evicted at a holder."""
        most = 0
        for f in leg.fetches:
            if f.nth == nth and (f.src == "k" or (f.src == "w" and not self.rules.no_pin)):
                most = max(most, f.first + f.left + f.flying + f.landed)
        return most

    def own(self, r: Request, leg: Leg) -> int:
        """Blocks that the request holds at the worker that computes it."""
        if (self.rules.fetch_first or r.takes) and leg.c in "fq":
            return r.held
        if leg.c == "n":
            return r.size - leg.fetches[-1].asked
        return r.size if leg.c in "fcs" else 0

    def weight(
        self, i: int, number: int, mood: Mood
    ) -> tuple[list[int], list[int], list[int], int]:
        """Of each pool: blocks that are used or cached, those of them that can be evicted, those
        that a frozen worker may still write to; and the pools where the request is the head."""
        r, leg = self.requests[i], self.legs[number]
        used, loose, stuck = ([0] * len(self.pools) for _ in range(3))
        c, heads = self.pools.index(r.at), 0
        if r.at != mood.dead:
            used[c] += self.own(r, leg)
            for f in leg.fetches:
                attached = leg.c == "f" and f is leg.fetches[-1]
                if f.sink in "oal" and not attached:
                    used[c] += f.asked
                    stuck[c] += f.asked * (holder(r, f) == mood.frozen)
        heads |= (leg.c == "h") << c
        if r.to and r.to != mood.dead:
            d = self.pools.index(r.to)
            used[d] += r.size * (leg.d in "ru") + r.size * bool(leg.fence)
            stuck[d] += r.size * bool(leg.fence and r.at == mood.frozen)
            heads |= (leg.d in "hK") << d
        for nth, h, stock in ((0, r.holder, leg.stock), (1, r.second, leg.stock2)):
            if stock and h != mood.dead:
                where = self.pools.index(h)
                used[where] += stock
                loose[where] += stock - min(stock, self.pinned(leg, nth))
        return used, loose, stuck, heads

    def evict(self, legs: list[int], pool: str, number: int) -> None:
        """Cached blocks in `pool` go, so that `number` blocks become free."""
        for i, r in enumerate(self.requests):
            for nth, h in ((0, r.holder), (1, r.second)):
                leg = self.legs[legs[i]]
                stock = leg.stock2 if nth else leg.stock
                lost = min(number, stock - min(stock, self.pinned(leg, nth)))
                if h == pool and lost > 0:
                    number -= lost
                    kept = {"stock2" if nth else "stock": stock - lost}
                    legs[i] = self.number(leg._replace(**kept))

    # -- moves of the fleet --------------------------------------------------------------------

    def moves(self, state: State) -> Iterator[tuple[str, int, State]]:
        """What can happen next, and to which request. Raises Wrong."""
        legs, mood_number = state[:-1], state[-1]
        mood = self.moods[mood_number]
        marks = mood_number
        raw = list(self.fleet.pools.values())
        room, loose = list(raw), [0] * len(raw)
        heads = 0
        for i, number in enumerate(legs):
            found = self._weights.get((i, number, marks))
            if found is None:
                found = self._weights[i, number, marks] = self.weight(i, number, mood)
            for k in range(len(raw)):
                raw[k] -= found[0][k]
                loose[k] += found[1][k]
                room[k] -= found[2][k]
            heads |= found[3]
        sound = not (self.rules.no_pin or self.rules.trusts_hint)
        assert not sound or min(raw) >= 0, self.show(state)
        for i, (r, number) in enumerate(zip(self.requests, legs, strict=True)):
            c = self.pools.index(r.at)
            d = self.pools.index(r.to) if r.to else c
            context = Context(
                not heads >> c & 1,
                not heads >> d & 1,
                min(r.size, raw[c] + loose[c]),
                min(r.size, raw[d] + loose[d]),
                room[c] < r.size,
                room[d] < r.size,
                self.rules.promises and self.is_twin(i, legs, r.holder, "whfc"),
                bool(r.chain) and self.is_twin(i, legs, r.at, "f"),
                mood,
            )
            key = (r, number, *context[:-1], mood_number)
            changes = self._changes.get(key)
            if changes is None:
                changes = self._changes[key] = self.worked_out(r, self.legs[number], context)
            if isinstance(changes, Wrong):
                raise changes
            for text, after, pool, needed, spends in changes:
                there = list(legs)
                there[i] = after
                if pool and needed > raw[self.pools.index(pool)]:
                    self.evict(there, pool, needed - raw[self.pools.index(pool)])
                now = mood_number
                if spends:
                    now = self.number(mood._replace(**{spends: getattr(mood, spends) - 1}))
                yield text, i, self.sorted(there, now)
        if mood.crashes or mood.freezes or mood.frozen:
            yield from self.mishaps(state, mood)

    def worked_out(
        self, r: Request, leg: Leg, context: Context
    ) -> list[tuple[str, int, str, int, str]] | Wrong:
        try:
            found = list(self.changes(r, leg, context))
        except Wrong as error:
            return error
        return [
            (each.text, self.number(tidy(each.leg)), each.pool, each.number, each.spends)
            for each in found
        ]

    def mishaps(self, state: State, mood: Mood) -> Iterator[tuple[str, int, State]]:
        """Crashes and freezes."""
        fleet = self.fleet
        for pool in fleet.pools if mood.crashes else ():
            legs = []
            for r, number in zip(self.requests, state, strict=False):
                legs.append(self.number(tidy(crashed(r, self.legs[number], pool))))
            frozen = "" if mood.frozen == pool else mood.frozen
            after = mood._replace(crashes=0, dead=pool, frozen=frozen)
            yield f"{pool} crashes", 0, self.sorted(legs, self.number(after))
        for pool in fleet.pools if mood.freezes else ():
            if pool != mood.dead and fleet.freezable in ("", pool):
                after = mood._replace(freezes=0, frozen=pool)
                yield f"{pool} freezes", 0, (*state[:-1], self.number(after))
        if mood.frozen and fleet.thaws:
            after = mood._replace(frozen="")
            yield f"{mood.frozen} goes on", 0, (*state[:-1], self.number(after))

    def is_twin(self, i: int, legs: tuple[int, ...], at: str, states: str) -> bool:
        """Whether another request with the same prefix is in one of these states at a worker."""
        return any(
            j != i
            and other.at == at
            and other.chain == self.requests[i].chain
            and self.legs[legs[j]].c in states
            for j, other in enumerate(self.requests)
        )

    # -- moves of one request ------------------------------------------------------------------

    def changes(self, r: Request, leg: Leg, context: Context) -> Iterator[Change]:
        """All that can happen to a request. Raises Wrong."""
        dead, cold = context.mood.dead, context.mood.frozen
        if r.at not in (dead, cold):
            yield from self.admissions(r, leg, context)
            yield from self.at_computer(r, leg, context)
            for j in range(len(leg.fetches)):
                yield from self.at_sink(r, leg, j, dead)
        for j, f in enumerate(leg.fetches):
            h = holder(r, f)
            if h not in (dead, cold):
                for text, after in self.at_source(r, f, leg, context):
                    yield Change(text.replace("{h}", h), with_fetch(leg, j, after))
            if f.flying and h != cold:
                yield from self.fetched(r, leg, j, dead)
        if leg.flying and r.at != cold:
            yield from self.in_flight(leg, r.size, dead == r.to, dead == r.at)
        if r.to and r.to not in (dead, cold):
            yield from self.at_target(r, leg, context)
            yield from self.on_trouble(leg, dead == r.at, cold == r.at)
        yield from self.mishaps_of(r, leg, context)

    def mishaps_of(self, r: Request, leg: Leg, context: Context) -> Iterator[Change]:
        """Eviction, a client that goes away, a link that breaks, a write that fails."""
        mood = context.mood
        for nth, h, stock in ((0, r.holder, leg.stock), (1, r.second, leg.stock2)):
            is_loose = self.fleet.evicts and stock > self.pinned(leg, nth)
            if is_loose and h not in (mood.dead, mood.frozen):
                fewer = {"stock2" if nth else "stock": stock - 1}
                yield Change(h + " evicts a block of {r}", leg._replace(**fewer))
        is_open = leg.c != "x" or leg.d != "e"
        if mood.aborts and is_open and not (leg.abort_d or leg.abort_c):
            gone = leg._replace(abort_d=leg.d != "e", abort_c=leg.c != "x")
            yield Change("the client of {r} goes away", gone, spends="aborts")
        for j, f in enumerate(leg.fetches):
            h = holder(r, f)
            both_live = mood.dead not in (r.at, h)
            if mood.breaks and both_live and (f.sink in "oa" or f.src == "w"):
                cut = f._replace(up="", down="", old="".join(sorted(f.old + f.up)), lost=True)
                yield Change("a link of {r} breaks", with_fetch(leg, j, cut), spends="breaks")
                if f.src == "w" and h != mood.frozen:
                    after = with_fetch(leg, j, self.closing(cut._replace(left=0)))
                    text = "a link of {r} breaks, its source stops"
                    yield Change(text, after, spends="breaks")
            if mood.fails and both_live and f.src == "w" and f.flying and h != mood.frozen:
                bad = f._replace(src="x", left=0, down=f.down + "e")
                yield Change("a write of {r} fails", with_fetch(leg, j, bad), spends="fails")

    # -- the worker that computes ----------------------------------------------------------------

    def begun(self, leg: Leg) -> Leg:
        """It has its blocks and needs no other worker any more."""
        says = leg.knows == 1
        posts = leg.have if leg.knows == 2 else 0  # only if D grants before Begun
        return leg._replace(c="c", down=leg.down + "B" * says, flying=leg.flying + posts)

    def admissions(self, r: Request, leg: Leg, context: Context) -> Iterator[Change]:
        """C takes blocks for the whole prompt, to compute it or to fetch some of it first."""
        rules, free = self.rules, context.free_c
        if r.takes:
            yield from self.takeovers(r, leg, context)
            return
        if leg.c == "q" and free >= r.size - r.held:  # fetch_first: the rest
            yield Change("{c} allocates the rest of {r}", self.begun(leg), r.at, r.size - r.held)
        if leg.c == "n" and free >= leg.fetches[-1].asked:  # keeps_rest
            text = "{c} replaces the blocks of {r} that it left alone"
            yield Change(text, self.begun(leg), r.at, leg.fetches[-1].asked)
        if leg.c not in "wh" or not (leg.c == "h" or context.leads_c):
            return
        if context.follows:  # it will find these blocks here; it holds nothing meanwhile
            return
        if leg.fetches and leg.fetches[-1].sink in "?!":  # pins_when_asked
            f = leg.fetches[-1]
            if f.sink == "!" and free >= r.size:
                granted = with_fetch(leg, -1, f._replace(sink="o", up=f.up + "G"))
                text = "{c} admits {r} and grants some blocks"
                yield Change(text, granted._replace(c="f"), r.at, r.size)
            return
        if free >= r.size:
            yield Change("{c} admits {r}", self.begun(leg), r.at, r.size)
        wanted = held(r, len(leg.fetches))
        number = r.held if rules.fetch_first else r.size
        if wanted and free >= number:
            fetching = self.fetching(leg, wanted)
            if rules.begun_at_admission and leg.knows == 1:
                fetching = fetching._replace(down=fetching.down + "B")
            yield Change(
                "{c} admits {r} and grants some blocks to a holder", fetching, r.at, number
            )

    def takeovers(self, r: Request, leg: Leg, context: Context) -> Iterator[Change]:
        """C takes free blocks for a prefix if no request waits for memory, or lets it be."""
        if leg.c == "w" and context.leads_c and context.free_c >= r.held:
            yield Change("{c} takes {r} over", self.fetching(leg, r.held), r.at, r.held)
        if leg.c == "w":
            yield Change("{c} does not take {r} over", leg._replace(c="x"))
        if leg.c == "q" and context.free_c >= r.size - r.held:  # takes_and_waits
            text = "{c} has room for the rest of {r}"
            yield Change(text, leg._replace(c="x"), r.at, r.size - r.held)

    def fetching(self, leg: Leg, end: int) -> Leg:
        """The next holder is to write the blocks from `have` to `end`."""
        f = Fetch(nth=len(leg.fetches), first=leg.have, asked=end - leg.have, up="F")
        return leg._replace(c="f", fetches=(*leg.fetches, f))

    def at_computer(self, r: Request, leg: Leg, context: Context) -> Iterator[Change]:
        if leg.c == "-":
            came = leg._replace(c="w")
            if self.rules.pins_when_asked and r.held:
                came = came._replace(fetches=(Fetch(asked=r.held, sink="?", up="A"),))
            yield Change("{c} receives {r}", came)
        elif r.takes:
            pass  # it is no head, and computes nothing
        elif leg.c == "w" and context.free_c < r.size and context.leads_c and not context.follows:
            yield Change("{c} takes {r} as next; it has no room", leg._replace(c="h"))
        elif leg.c == "c" and leg.have + leg.computed < r.size:
            posts = leg.knows == 2
            more = leg._replace(computed=leg.computed + 1, flying=leg.flying + posts)
            yield Change("{c} computes a block of {r}" + " and writes it" * posts, more)
        elif leg.c == "c" and not r.to:
            yield Change("{c} ends {r}", leg._replace(c="x"))
        if leg.up:
            yield self.hear(leg._replace(up=leg.up[1:]), leg.up[0])
        if leg.abort_c and leg.c != "-":
            text = "{c} hears that {r} is unwanted"
            yield Change(text, self.quit(leg._replace(abort_c=False)))
        if leg.c in "wh" and self.rules.gives_back and context.tight_c:
            yield Change("{c} gives {r} back: no room", self.quit(leg))
        if leg.c not in "-x" and r.to and r.to == context.mood.frozen:
            yield Change("{c} drops {r}: {d} asks no more", self.quit(leg))

    def quit(self, leg: Leg) -> Leg:
        """The attempt ends at C. What a holder may write to stays fenced."""
        f = leg.fetches[-1] if leg.fetches else None
        if f is not None and f.sink in "?!":
            leg = with_fetch(leg, -1, f._replace(sink="x", up=f.up + "b"))
        elif f is not None and leg.c == "f" and f.sink == "o":
            rules = self.rules
            is_free = rules.no_fence or (rules.unheard_is_free and not f.landed)
            told = f._replace(sink="x" if is_free else "a", up=f.up + "b")
            leg = with_fetch(leg, -1, told)
        return self.stop(leg)

    def stop(self, leg: Leg) -> Leg:
        """Post nothing more to D; close when nothing is under way."""
        closed = leg._replace(c="x", down=leg.down + "c" * (leg.c != "x" and leg.knows > 0))
        return leg._replace(c="s") if leg.flying and leg.c != "x" else closed

    def hear(self, leg: Leg, message: str) -> Change:
        """What D says; for what is closed the answer is given again."""
        text = f"{{c}} receives { {'a': 'Ask', 'g': 'the grant of', 'b': 'Abort'}[message] } {{r}}"
        known = leg._replace(knows=leg.knows or 1)
        if leg.c in "sx":
            return Change(text, known._replace(down=leg.down + "c" * (leg.c == "x")))
        if message == "b":
            return Change(text, self.quit(known))
        if message == "g":  # what is ready leaves now
            ready = (leg.have + leg.computed) * (leg.c == "c")
            return Change(text, leg._replace(knows=2, flying=ready))
        says = leg.c == "c" or (leg.c == "f" and self.rules.begun_at_admission)
        says = says and leg.knows < 2
        text += " and says Begun" * says
        return Change(text, known._replace(down=leg.down + "B" * says))

    # -- the sink of a fetch -----------------------------------------------------------------------

    def at_sink(self, r: Request, leg: Leg, j: int, dead: str) -> Iterator[Change]:  # noqa: C901, PLR0915
        """C's side of a fetch; the last one is the request's own while it fetches."""
        rules, f = self.rules, leg.fetches[j]
        is_own = leg.c == "f" and j == len(leg.fetches) - 1
        h = holder(r, f)
        unpins = "u" * rules.pins_until_told

        def over(after: Fetch, text: str) -> Iterator[Change]:
            """The fence falls."""
            ended = with_fetch(leg, j, after._replace(sink="x"))
            for each in self.arrived(r, ended, f) if is_own else [ended]:
                yield Change(text.replace("{h}", h), each)

        def waits(after: Fetch, text: str) -> Change:
            return Change(text.replace("{h}", h), with_fetch(leg, j, after))

        if f.down:
            rest, message = f._replace(down=f.down[1:]), f.down[0]
            if f.sink == "?":
                yield waits(rest._replace(sink="!"), "{c} hears that {h} keeps blocks for {r}")
            elif f.sink not in "oa":
                yield waits(rest, "{c} hears that {h} closed {r}, again")
            elif message == "e" and not rules.ignores_error:
                yield waits(rest._replace(sink="l"), "{c} hears that {h} failed with {r}")
            else:
                yield from over(rest._replace(up=rest.up + unpins), "{c} hears that {h} closed {r}")
        if f.sink == "o" and f.landed == f.asked and is_own:
            yield from over(f._replace(up=f.up + unpins), "{c} has all that it fetches of {r}")
        if f.sink == "o" and is_own and rules.gives_up and h != dead:
            told = f._replace(sink="a", up=f.up + "b")
            if rules.computes_in_fence:
                yield from over(told, "{c} tells {h} to stop, and computes {r}")
            else:
                yield waits(told, "{c} tells {h} to stop with {r}")
        if f.sink in "al" and is_own and rules.gives_up:
            text = "{c} leaves what {h} may write to alone; {r} waits again"
            waits_as = "x" if r.takes else "n" if rules.keeps_rest else "w"
            yield Change(text.replace("{h}", h), leg._replace(c=waits_as, have=0))
        if f.sink in "oa" and h == dead:
            lost = f._replace(sink="l", up="", down="", old="", lost=False)
            if rules.skips_landing:
                yield from over(lost, "{c} sees that {h} is gone")
            else:
                yield waits(lost, "{c} sees that {h} is gone")
        if f.sink == "l" and not f.flying:  # the time in which a posted write lands is over
            yield from over(f, "{c} lifts the fence around what {h} wrote of {r}")
        if f.sink in "oa" and f.lost and not f.up and h != dead:
            again = f._replace(lost=False, up="b" if f.sink == "a" else "r")
            yield waits(again, "{c} asks {h} again about {r}")

    def arrived(self, r: Request, leg: Leg, f: Fetch) -> list[Leg]:
        """A fetch is over: what came counts. C computes the rest, or another holder has some."""
        have = f.first + (f.asked if self.rules.ignores_count else f.landed)
        if have > f.first + f.landed:
            raise Wrong("a block is used that never arrived")
        leg = leg._replace(have=have)
        if r.takes:  # cached, as what a request has left behind
            return [leg._replace(c="q" if self.rules.takes_and_waits else "x")]
        if self.rules.fetch_first:
            return [leg._replace(c="q")]
        more = held(r, len(leg.fetches))
        return [self.begun(leg), *([self.fetching(leg, more)] if more > have else [])]

    # -- the source of a fetch ---------------------------------------------------------------------

    def at_source(
        self, r: Request, f: Fetch, leg: Leg, context: Context
    ) -> Iterator[tuple[str, Fetch]]:
        """The holder's side of a fetch."""
        stock = leg.stock2 if f.nth else leg.stock
        for k in range(len(f.old)):
            rest = f._replace(old=f.old[:k] + f.old[k + 1 :])
            yield "an old message about {r} is dropped", rest
            yield "{h} receives an old message about {r}", self.served(rest, f.old[k], stock, False)
        if f.up:
            rest, name = f._replace(up=f.up[1:]), _FETCH_MESSAGES[f.up[0]]
            text = f"{{h}} receives {name} {{r}}"
            yield text, self.served(rest, f.up[0], stock, context.promised)
        if f.src == "p" and not context.promised:
            yield "{h} has computed what it promised for {r}", self.serve(f, stock)
        if f.src == "w" and f.left:
            yield "{h} writes a block of {r}", f._replace(left=f.left - 1, flying=f.flying + 1)
        if f.src == "w" and context.mood.dead == r.at:
            yield "{h} sees that {c} is gone", self.closing(f._replace(left=0))

    def served(self, f: Fetch, message: str, stock: int, is_promised: bool) -> Fetch:
        """The holder hears a message about a fetch."""
        if message == "F":
            if f.src != "-":
                return f._replace(down=f.down + "c" * (f.src == "x"))
            waits = is_promised and self.rules.promises
            return f._replace(src="p") if waits else self.serve(f, stock)
        if message == "A":  # pins_when_asked
            found = min(f.asked, stock)
            return f._replace(src="k" if found else "x", left=found, down=f.down + "B")
        if message == "G":
            return f._replace(src="w") if f.src == "k" else f._replace(down=f.down + "c")
        if message == "u":
            return f._replace(src="x")
        if f.src in "-p":  # what is not known when it is aborted or renewed is never served
            after = "-" if self.rules.forgets_unknown else "x"
            return f._replace(src=after, down=f.down + "c")
        if f.src == "x":
            return f._replace(down=f.down + "c")
        if message == "b" and f.src == "k":
            return f._replace(src="x", left=0, down=f.down + "c")
        return self.closing(f._replace(left=0)) if message == "b" else f

    def serve(self, f: Fetch, stock: int) -> Fetch:
        """Pin what is there of what was asked for, and write it. Nothing is waited for."""
        found = f.asked
        if not self.rules.trusts_hint:
            found = max(0, min(f.first + f.asked, stock) - f.first)
        if not found:
            return f._replace(src="x", down=f.down + "c")
        return f._replace(src="w", left=found)

    def closing(self, f: Fetch) -> Fetch:
        """Close once nothing is left to write and nothing is under way."""
        if f.src != "w" or f.left or f.flying:
            return f
        if self.rules.pins_until_told:
            answers = f.sink in "oa" and "c" not in f.down
            return f._replace(down=f.down + "c" * answers)
        return f._replace(src="x", down=f.down + "c")

    def fetched(self, r: Request, leg: Leg, j: int, dead: str) -> Iterator[Change]:
        """A write of a fetch lands, or is lost with a worker or after an error."""
        f = leg.fetches[j]
        h, fewer = holder(r, f), f._replace(flying=f.flying - 1)
        if dead in (r.at, h) or f.src != "w":
            yield Change("a write of {r} is lost", with_fetch(leg, j, self.closing(fewer)))
        if dead == r.at:
            return
        if f.sink not in "oal":
            raise Wrong("a write lands in a block that is no longer granted")
        stock = leg.stock2 if f.nth else leg.stock
        if f.src == "w" and stock <= f.first + f.landed:
            raise Wrong("a block is read that has been evicted")
        counts = f.src == "w" or h == dead  # a write that failed is not announced
        landed = fewer._replace(landed=f.landed + counts)
        text = f"a block of {{r}} lands from {h}"
        yield Change(text, with_fetch(leg, j, self.closing(landed)))

    # -- the handoff from C to D: the rules of handoff_model.py ------------------------------------

    def in_flight(self, leg: Leg, size: int, to_dead: bool, of_dead: bool) -> Iterator[Change]:
        """A write lands at D, which hears of it; one from or to a dead worker may be lost."""
        fewer = leg._replace(flying=leg.flying - 1)
        if to_dead or of_dead:
            yield Change("a write of {r} is lost", self.stop(fewer) if leg.c == "s" else fewer)
        if not to_dead and leg.d != "r" and not leg.fence:
            raise Wrong("a write lands in a block that D has taken back")
        if not to_dead and leg.landed + 1 == size:  # complete: both sides let go
            runs = "u" if leg.d == "r" else leg.d
            yield Change("the last write of {r} lands", fewer._replace(c="x", d=runs, fence=""))
        elif not to_dead:
            fewer = fewer._replace(landed=leg.landed + 1)
            yield Change("a write of {r} lands", self.stop(fewer) if leg.c == "s" else fewer)

    def at_target(self, r: Request, leg: Leg, context: Context) -> Iterator[Change]:
        is_called = leg.called or self.rules.eager
        fits, leads = context.free_d >= r.size, context.leads_d
        if leg.d == "-":
            yield Change("{d} receives {r} and sends Ask", leg._replace(d="w", up="a"))
        elif leg.d in "wh" and is_called and fits and (leg.d == "h" or leads):
            granted = leg._replace(d="r", up=leg.up + "g", called=False)
            yield Change("{d} reserves blocks for {r} and grants them", granted, r.to, r.size)
        elif leg.d in "kK" and fits and (leg.d == "K" or leads):
            yield Change("{d} computes {r} alone", leg._replace(d="u"), r.to, r.size)
        elif leads and (leg.d == "k" or (leg.d == "w" and is_called)):
            head = leg._replace(d="h" if leg.d == "w" else "K")
            yield Change("{d} takes {r} as next; it has to wait", head)
        elif leg.d == "u":
            yield Change("{d} ends {r}", leg._replace(d="e"))
        if leg.down:
            has_begun, rest = leg.down[0] == "B", leg._replace(down=leg.down[1:])
            ended = rest._replace(d="e" if leg.d in "whr" else leg.d, fence="")
            news = rest._replace(called=leg.d in "wh") if has_begun else ended
            yield Change("{d} hears that {r} " + ("has begun" if has_begun else "is closed"), news)
        if leg.abort_d and leg.d != "-":
            text = "{d} hears that {r} is unwanted"
            yield Change(text, self.give_up(leg._replace(abort_d=False), "e"))
        if leg.d in "whkK" and self.rules.gives_back and context.tight_d:
            yield Change("{d} gives {r} back: no room", self.give_up(leg, "e"))

    def give_up(self, leg: Leg, then: str) -> Leg:
        """The attempt ends at D; granted blocks stay behind a fence until C answers."""
        if leg.d == "r":
            return leg._replace(d=then, fence="f", up=leg.up + "b")
        return leg._replace(d=then, called=False, up=leg.up + "b" * (leg.d in "wh"))

    def on_trouble(self, leg: Leg, is_dead: bool, is_frozen: bool) -> Iterator[Change]:
        """D notices that C is dead or frozen; the next attempt computes the prompt at D."""
        if is_dead and leg.d in "whr":
            again = leg._replace(d="k", fence="l" if leg.d == "r" else "", called=False)
            yield Change("{d} gives {r} up, {c} is gone; {d} is to compute it alone", again)
        elif is_dead and leg.fence == "f":
            yield Change("{d} sees that {c} is gone", leg._replace(fence="l"))
        elif is_dead and leg.fence and not leg.flying:
            yield Change("{d} lifts the fence of {r}", leg._replace(fence=""))
        if is_frozen and leg.d in "whr":
            text = "{d} gives {r} up, {c} is silent; {d} is to compute it alone"
            yield Change(text, self.give_up(leg, "k"))


_FETCH_MESSAGES = {
    "F": "the fetch of",
    "b": "Abort of the fetch of",
    "r": "a renewal of the fetch of",
    "A": "a question about",
    "G": "the grant for",
    "u": "that it may unpin",
}


def holder(r: Request, f: Fetch) -> str:
    """The source of a fetch."""
    return r.second if f.nth else r.holder


def held(r: Request, nth: int) -> int:
    """The blocks that a holder is said to have; 0 if there is no such holder."""
    return (r.held, r.more)[nth] if nth < 2 else 0


def with_fetch(leg: Leg, j: int, f: Fetch) -> Leg:
    """The leg with this fetch in place `j`."""
    fetches = list(leg.fetches)
    fetches[j] = f
    return leg._replace(fetches=tuple(fetches))


def crashed(r: Request, leg: Leg, pool: str) -> Leg:
    """A dead worker says and posts no more; the router aborts what was for it."""
    fetches = []
    for f in leg.fetches:
        if r.at == pool:
            f = f._replace(sink="x", up="", down="", old="", lost=False)
            f = f._replace(src="x") if f.src == "-" else f
        if holder(r, f) == pool:
            f = f._replace(src="x", left=0, up="", down="", old="", lost=False)
        fetches.append(f)
    leg = leg._replace(fetches=tuple(fetches))
    if r.holder == pool:
        leg = leg._replace(stock=0)
    if r.second == pool:
        leg = leg._replace(stock2=0)
    if r.at == pool:
        leg = leg._replace(c="x", knows=0, up="", abort_c=False)
    if r.to == pool:
        leg = leg._replace(d="e", called=False, fence="", down="", abort_d=False)
        leg = leg._replace(abort_c=leg.c not in "xs")
    return leg


def tidy(leg: Leg) -> Leg:
    """Equal states look equal: what is ignored from now on goes."""
    if leg.c == "x" and leg.d in "uke" and not leg.flying and not leg.fence:
        aborts = leg.abort_d and leg.d != "e"
        leg = leg._replace(have=0, computed=0, landed=0, knows=0, called=False, up="", down="")
        leg = leg._replace(abort_c=False, abort_d=aborts)
    if leg.fetches:
        fetches = []
        for f in leg.fetches:
            is_over = f.sink == f.src == "x" and not f.flying
            fetches.append(Fetch(nth=f.nth, sink="x", src="x") if is_over else f)
        leg = leg._replace(fetches=tuple(fetches))
    if leg.c == "x" and all(f.src == "x" for f in leg.fetches):
        leg = leg._replace(stock=0, stock2=0)
    return leg


def _before(states: list[int], before: list[list[int]]) -> set[int]:
    """These states, and all from which one of them can be reached."""
    seen = set(states)
    for here in states:  # it grows meanwhile, backwards
        states += {each for each in before[here] if each not in seen}
        seen.update(before[here])
    return seen


def check(  # noqa: C901
    fleet: Fleet, rules: Rules, reduces: bool = True, most: int = 5_000_000
) -> tuple[str, int, list[str]]:
    """Verdict, number of states, and a shortest trace of what is wrong."""
    model = Model(fleet, rules, reduces)
    states, ids = [model.start()], {model.start(): 0}
    came: list[tuple[int, str, int]] = [(0, "", 0)]  # from which state, by what
    before: list[list[int]] = [[]]
    num_next: list[int] = []  # of moves, by state

    def trace(here: int) -> list[str]:
        texts = []
        while here:
            here, text, i = came[here]
            r = model.requests[i]
            texts.append(text.format(r="ABCDEFG"[i], c=r.at, d=r.to))
        return texts[::-1]

    for here, state in enumerate(states):  # they get more meanwhile
        nexts = set()
        try:
            for text, i, after in model.moves(state):
                there = ids.setdefault(after, len(states))
                if there == len(states):
                    states.append(after)
                    came.append((here, text, i))
                    before.append([])
                if there != here:
                    nexts.add(there)
        except Wrong as error:
            return "WRONG", len(states), [*trace(here), f"{error}"]
        for there in nexts:
            before[there].append(here)
        num_next.append(len(nexts))
        if len(states) > most:
            return "TOO MANY", len(states), []
    last = [i for i, number in enumerate(num_next) if not number]
    if stuck := [here for here in last if not model.is_end(states[here])]:
        return "DEADLOCK", len(states), [*trace(stuck[0]), "and then nothing can happen"]
    seen = _before([i for i, state in enumerate(states) if model.is_end(state)], before)
    if len(seen) < len(states):
        here = min(set(range(len(states))) - seen)
        return "NO WAY OUT", len(states), [*trace(here), model.show(states[here])]
    for here in last:  # it grows, too: by states after which only such ones come
        for each in before[here]:
            num_next[each] -= 1
            if not num_next[each]:
                last.append(each)
    return "safe, alive" + ", ends" * (len(last) == len(states)), len(states), []


# -- what is checked ------------------------------------------------------------------------------

DEAD, WRONG, ALIVE, ENDS = "DEADLOCK", "WRONG", "safe, alive", "safe, alive, ends"
Row = tuple[str, Rules, str, list[Fleet]]  # a name, rules, how each verdict must begin, fleets
W2, W3, PD, PD3 = {"W0": 2, "W1": 2}, {"W0": 3, "W1": 3}, {"P": 2, "D": 2}, {"P": 3, "D": 3}
P1D2 = {"P": 2, "D0": 2, "D1": 2}
P2D1 = {"P0": 2, "P1": 2, "D": 2}

A, B = Request("W0", "", 2, "W1", 1), Request("W1", "", 2, "W0", 1)  # fetch from each other
A0, B0 = Request("W0", "", 2), Request("W1", "", 1)  # have nothing to fetch
A3, B3 = Request("W0", "", 3, "W1", 2), Request("W1", "", 3, "W0", 2)
F = Request("P", "D", 2, "D", 1)  # P fetches from the worker that it writes to
G, S = Request("P", "D", 2), Request("P", "D", 1)
L = Request("D", "", 2, "P", 1)  # D goes on alone, and fetches from P
T = Request("W0", "", 2, "W1", 1, takes=True)  # W0 takes a part of W1's cache over
U = Request("W1", "", 2, "W0", 1, takes=True)


def mixes(pools: dict[str, int], counts: str, kinds: list[Request], **more: object) -> list[Fleet]:
    """Every mix of these requests, at least one of which fetches."""
    found = []
    for count in counts:
        for mix in combinations_with_replacement(kinds, int(count)):
            if any(r.held for r in mix):
                found.append(Fleet(pools, mix, **more))  # type: ignore[arg-type]
    return found


def with_(fleets: list[Fleet], **more: object) -> list[Fleet]:
    """The same fleets with more mishaps."""
    return [replace(fleet, **more) for fleet in fleets]  # type: ignore[arg-type]


def wrong_rows() -> list[Row]:
    """Rules that are wrong on purpose, each in one small fleet."""
    both, pair, fetch = Fleet(W2, (A, B)), Fleet(PD, (F, G)), Fleet(PD, (F,))
    cold = Fleet({"W0": 4, "W1": 2}, (A, A), freezes=1)
    fork = Fleet(W2, (A._replace(chain="x"), B._replace(chain="x")))
    return [
        ("wrong: D grants before C has begun", Rules(eager=True), DEAD, [pair]),
        ("wrong: Begun before the fetch is over", Rules(begun_at_admission=True), DEAD, [pair]),
        (
            "wrong: blocks for the fetch, later the rest",
            Rules(fetch_first=True),
            DEAD,
            [Fleet(W2, (A, A))],
        ),
        ("wrong: H pins when asked, before the grant", Rules(pins_when_asked=True), DEAD, [both]),
        ("wrong: H pins until told", Rules(pins_until_told=True), DEAD, [replace(both, crashes=1)]),
        ("wrong: H promises what it computes", Rules(promises=True, gives_up=False), DEAD, [fork]),
        ("wrong: what waits again keeps its blocks", Rules(keeps_rest=True), DEAD, [cold]),
        (
            "wrong: C waits for a frozen H for ever",
            Rules(gives_up=False),
            DEAD,
            [replace(both, freezes=1)],
        ),
        ("wrong: C gives nothing back", Rules(gives_back=False), DEAD, [replace(both, freezes=1)]),
        ("wrong: no fence after an abort", Rules(no_fence=True), WRONG, [replace(both, aborts=1)]),
        (
            "wrong: no fence before the first write",
            Rules(unheard_is_free=True),
            WRONG,
            [replace(fetch, aborts=1)],
        ),
        (
            "wrong: the fence falls with H's death",
            Rules(skips_landing=True),
            WRONG,
            [replace(both, crashes=1)],
        ),
        (
            "wrong: an error closes like a success",
            Rules(ignores_error=True),
            WRONG,
            [replace(both, fails=1)],
        ),
        ("wrong: C computes into granted blocks", Rules(computes_in_fence=True), WRONG, [both]),
        (
            "wrong: an unknown fetch is not remembered",
            Rules(forgets_unknown=True),
            WRONG,
            [replace(both, breaks=1)],
        ),
        ("wrong: H trusts the hint", Rules(trusts_hint=True), WRONG, [both]),
        ("wrong: H does not pin", Rules(no_pin=True), WRONG, [both]),
        ("wrong: C takes all for arrived", Rules(ignores_count=True), WRONG, [both]),
        (
            "wrong: who takes over waits for room",
            Rules(takes_and_waits=True),
            DEAD,
            [Fleet(W2, (T, T))],
        ),
    ]


def small_rows() -> list[Row]:
    """The design in the smaller fleets."""
    no_deadline = Rules(gives_up=False)
    both, pd = mixes(W2, "23", [A, B, A0]), [*mixes(PD, "2", [F, S, L]), Fleet(PD3, (F, L))]
    both.append(Fleet(W3, (A, B)))  # in pools of 3 both prefixes may be fetched at once
    one = [*mixes(W2, "2", [A, B, A0]), Fleet(W3, (A, B))]
    taken = [Fleet(W2, mix) for mix in ((A, T), (B, T), (T, T), (T, U))]
    return [
        ("no deadlines: fetches both ways", no_deadline, ENDS, both),
        ("no deadlines: fetches and handoffs", no_deadline, ENDS, mixes(PD, "23", [F, S, L])),
        ("fetches both ways, 2 and 3 requests", DESIGN, ENDS, both),
        ("an abort", DESIGN, ENDS, with_(one, aborts=1)),
        ("a crash", DESIGN, ENDS, with_(one, crashes=1)),
        ("a worker freezes", DESIGN, ENDS, with_(one, freezes=1)),
        ("a worker freezes and goes on", DESIGN, ALIVE, with_(one, freezes=1, thaws=True)),
        ("a link breaks", DESIGN, ENDS, with_(one, breaks=1)),
        ("a write fails", DESIGN, ENDS, with_(one, fails=1)),
        ("no deadlines: a cache is taken over", no_deadline, ENDS, taken),
        ("a cache is taken over, an abort", DESIGN, ENDS, with_(taken, aborts=1)),
        ("... a crash", DESIGN, ENDS, with_(taken, crashes=1)),
        ("... a worker freezes", DESIGN, ENDS, with_(taken, freezes=1)),
        ("... a link breaks", DESIGN, ENDS, with_(taken, breaks=1)),
        ("... a write fails", DESIGN, ENDS, with_(taken, fails=1)),
        ("fetches and handoffs, 1P1D", DESIGN, ENDS, pd),
        ("... an abort", DESIGN, ENDS, with_(pd, aborts=1)),
        ("... a crash", DESIGN, ENDS, with_(pd, crashes=1)),
        ("... a worker freezes", DESIGN, ENDS, with_(pd, freezes=1)),
    ]


def large_rows() -> list[Row]:
    """The design in the larger fleets, and with more mishaps."""
    two = [Fleet(W2, (A, B)), Fleet(W3, (A, B))]
    three = [Fleet(W2, (A, A, B)), Fleet(W3, (A, B, A0))]
    deep = [Fleet(W3, (A3, B3)), Fleet(W3, (A3, A3, B3)), Fleet(W3, (A3, A, B3))]
    pd = [Fleet(PD3, (F, L)), Fleet(PD, (F, F)), Fleet(PD, (F, G))]  # the first two: also above
    is_long = "--long" in sys.argv
    links = two if is_long else two[:1]
    pd1 = pd[:1] if is_long else [Fleet(PD, (F, L))]
    pd3 = [Fleet(PD, (F, G, L)), Fleet(PD, (F, F, L))]
    if is_long:
        pd3.append(Fleet(PD3, (F, S, L)))
    far = Request("P", "D1", 2, "D0", 1)  # the answer lies on D0, the next turn goes to D1
    near = Request("P", "D0", 2, "D0", 1)
    other = Request("D0", "", 2, "D1", 1)
    split = [
        Fleet(P1D2, mix)
        for mix in ((far, near), (far, far), (far, other), (near, other), (far, near, other))
    ]
    peer = [Request("P0", "D", 2, "P1", 1), Request("P1", "D", 2, "P0", 1)]
    peers = [Fleet(P2D1, tuple(peer)), Fleet(P2D1, (peer[0], peer[0], peer[1]))]
    chain = Request("P", "D0", 3, "D0", 1, "D1", 2)
    second = [
        Fleet({"P": 3, "D0": 3, "D1": 2}, (chain,)),
        Fleet({"P": 3, "D0": 3, "D1": 2}, (chain, other)),
    ]
    leaves = Request("D0", "D1", 2, departs=True)  # D0 drains, and serves fetches
    drains = [
        Fleet({"D0": 3, "D1": 2}, (leaves, Request("D1", "", 2, "D0", 1))),
        Fleet({"D0": 3, "D1": 3, "P": 2}, (leaves, Request("P", "D1", 2, "D0", 1))),
        Fleet(
            {"D0": 3, "D1": 2, "P": 2},
            (leaves, Request("D1", "", 2, "D0", 1), Request("P", "D1", 2, "D0", 1)),
        ),
    ]
    twin = A._replace(chain="t")
    twins = [Fleet({"W0": 4, "W1": 2}, (twin, twin, B)), Fleet(W3, (twin, twin, B0))]
    return [
        ("both ways, four requests", DESIGN, ENDS, [Fleet(W2, (A, A, B, B)), Fleet(W3, (A, A, B))]),
        ("both ways, prefixes of 2 blocks", DESIGN, ENDS, deep),
        ("both ways, 3 requests, an abort", DESIGN, ENDS, with_(three, aborts=1)),
        ("both ways, 2 requests, two aborts", DESIGN, ENDS, with_(two, aborts=2)),
        ("both ways, 3 requests, a crash", DESIGN, ENDS, with_(three, crashes=1)),
        ("both ways, 3 requests, a worker freezes", DESIGN, ENDS, with_(three, freezes=1)),
        ("both ways, ... and goes on", DESIGN, ALIVE, with_(three, freezes=1, thaws=True)),
        ("both ways, two links break", DESIGN, ENDS, with_(links, breaks=2)),
        ("both ways, 3 requests, a link breaks", DESIGN, ENDS, with_(three[:1], breaks=1)),
        ("both ways, a break and an abort", DESIGN, ENDS, with_(links, breaks=1, aborts=1)),
        ("both ways, a break and a crash", DESIGN, ENDS, with_(links, breaks=1, crashes=1)),
        ("both ways, a crash and an abort", DESIGN, ENDS, with_(two, crashes=1, aborts=1)),
        ("both ways, a freeze and an abort", DESIGN, ENDS, with_(two, freezes=1, aborts=1)),
        (
            "both ways, freezes, goes on, and an abort",
            DESIGN,
            ALIVE,
            with_(two, freezes=1, thaws=True, aborts=1),
        ),
        ("both ways, a crash and a freeze", DESIGN, ENDS, with_(two, crashes=1, freezes=1)),
        ("both ways, a failed write and an abort", DESIGN, ENDS, with_(two, fails=1, aborts=1)),
        ("both ways, a failed write and a crash", DESIGN, ENDS, with_(two, fails=1, crashes=1)),
        ("1P1D, 3 requests", DESIGN, ENDS, pd3),
        ("1P1D, an abort", DESIGN, ENDS, with_(pd[2:], aborts=1)),
        ("1P1D, a crash", DESIGN, ENDS, with_(pd[2:], crashes=1)),
        ("1P1D, a worker freezes", DESIGN, ENDS, with_(pd[2:], freezes=1)),
        ("1P1D, a worker freezes and goes on", DESIGN, ALIVE, with_(pd1, freezes=1, thaws=True)),
        ("1P1D, a link breaks", DESIGN, ENDS, with_(pd1, breaks=1)),
        ("1P1D, a write fails", DESIGN, ENDS, with_(pd1, fails=1)),
        ("1P2D: held by D0, goes on at D1", DESIGN, ENDS, split),
        ("1P2D, a crash", DESIGN, ENDS, with_(split[:4], crashes=1)),
        ("2P1D: P0 and P1 fetch from each other", DESIGN, ENDS, peers[:1]),
        ("2P1D, a crash", DESIGN, ENDS, with_(peers[:1], crashes=1)),
        ("2P1D, a worker freezes", DESIGN, ENDS, with_(peers[:1], freezes=1)),
        ("two holders, one after the other", DESIGN, ENDS, second),
        ("two holders, a crash", DESIGN, ENDS, with_(second[:1], crashes=1)),
        ("two holders, a worker freezes", DESIGN, ENDS, with_(second[:1], freezes=1)),
        ("twins: one waits for the other's fetch", DESIGN, ENDS, twins),
        ("twins, a worker freezes", DESIGN, ENDS, with_(twins[1:], freezes=1)),
        ("D0 drains to D1 and serves a fetch", DESIGN, ENDS, drains),
        ("D0 drains and serves, a crash", DESIGN, ENDS, with_(drains[:2], crashes=1)),
        ("D0 drains and serves, an abort", DESIGN, ENDS, with_(drains[:2], aborts=1)),
    ]


def report(name: str, rules: Rules, wanted: str, fleets: list[Fleet]) -> tuple[bool, int]:
    """Check, and print how it went; of a wrong rule the trace, too. True if it is as wanted."""
    began, verdicts, states = time.process_time(), Counter(), 0
    for fleet in fleets:
        verdict, number, trace = check(fleet, rules, reduces=len(fleets) > 1)
        verdicts[verdict] += 1
        states += number
        if not verdict.startswith(wanted):
            print("\n".join([f"      {fleet}", *(f"      {text}" for text in trace)]))
    told = ", ".join(f"{number} {verdict}" for verdict, number in sorted(verdicts.items()))
    took = time.process_time() - began
    print(f"{name:<44}{states:>9,} states {took:5.1f} s  {told}", flush=True)
    if "--traces" in sys.argv and wanted in (DEAD, WRONG):
        for i, text in enumerate(trace, 1):
            print(f"      {i:2} {text}")
    return all(verdict.startswith(wanted) for verdict in verdicts), states


def main(argv: list[str]) -> int:
    """Check every row; 0 if all are as they must be."""
    rows = [*wrong_rows(), *small_rows(), *([] if "--quick" in argv else large_rows())]
    for arg in argv:
        if arg.startswith("--rows="):  # only some of them, as a slice
            first, end = arg.removeprefix("--rows=").split(":")
            rows = rows[int(first) : int(end or len(rows))]
    failed, total, began = [], 0, time.process_time()
    for row in rows:
        is_right, states = report(*row)
        total += states
        failed += [] if is_right else [row[0]]
    print(f"{len(rows)} rows, {total:,} states, {time.process_time() - began:.0f} s of one core")
    print("not as it must be: " + ", ".join(failed) if failed else "all as it must be")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
