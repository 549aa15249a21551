"""Every accepted request ends, whatever workers admit first, and with it every block comes back.

Workers of either role fetch cached blocks from each other, also both ways at once; many hints where
to fetch are wrong. Some have host memory below their pools.
Pools hold one prompt or a few; prompts, priorities, grammars, routers and the network make workers
admit in different orders. Clients go away; workers die, stand still and go on. Once no fault is
left, everything ends within a number of turns that the work bounds, before any time-out.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from scheduling import fetch_rule
from tests.effort import NIGHTLY, times
from tests.layouts import windowed_layout
from tests.unit.fake_model import BLOCK, VOCAB
from tests.unit.worker_fleet import Request, WorkerFleet
from tests.unit.worker_harness import LANDING_S, LAYOUT
from worker import served_fetches
from worker.inbound import fetches
from worker.inbound.fetches import STOP_WAIT_S
from worker.tiers import loads

MAX_OPEN = 9


@pytest.fixture(autouse=True)
def small_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single block is fetched, too, and all of a pool may be granted and served. Whatever a tier
    has is loaded."""
    monkeypatch.setattr(fetch_rule, "MIN_BLOCKS", 1)
    monkeypatch.setattr(fetch_rule, "SLACK_S", 0.0)
    monkeypatch.setattr(fetches, "HOLDER_SHARE", 1.0)
    monkeypatch.setattr(fetches, "ALL_SHARE", 1.0)
    monkeypatch.setattr(served_fetches, "SERVE_SHARE", 1.0)
    monkeypatch.setattr(loads, "TURN_S", -1.0)


class TightFleet(RuleBasedStateMachine):
    """1 to 3 routers, prefill and decode workers."""

    @initialize(
        sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
        pools=st.tuples(st.integers(2, 9), st.integers(2, 9)),
        may_fail=st.booleans(),
        host_slots=st.sampled_from([0, 0, 3, 16]),
        windows=st.sampled_from([(), (), (5,), (9,), (3, 6)]),
    )
    def begin(
        self,
        sizes: tuple[int, int, int],
        pools: tuple[int, int],
        may_fail: bool,
        host_slots: int,
        windows: tuple[int, ...],
    ) -> None:
        layout = LAYOUT
        if windows:
            layout, host_slots = windowed_layout(BLOCK, *windows), 0
            pools = (pools[0] + 8 * len(windows), pools[1] + 8 * len(windows))
        self.fleet = WorkerFleet(sizes, pools, host_slots=host_slots, layout=layout)
        self.may_fail = may_fail
        self.num_faults = 0
        self.longest = min(
            bench.scheduler.tables.most_tokens(BLOCK) for bench in self.fleet.workers.values()
        )

    @rule(
        size=st.integers(1, 99),
        tokens=st.integers(1, 9),
        priority=st.integers(0, 2),
        has_grammar=st.sampled_from([False, False, True]),
        place=st.tuples(
            st.sampled_from([True, True, False]),
            st.integers(0, 99),
            st.integers(0, 5),
        ),
    )
    def ask(
        self,
        size: int,
        tokens: int,
        priority: int,
        has_grammar: bool,
        place: tuple[bool, int, int],
    ) -> None:
        fleet, (is_remote, choice, holder) = self.fleet, place
        if len(self.open_requests()) >= MAX_OPEN:
            return
        tokens = min(tokens, self.longest - 1)
        size = min(size, self.longest - tokens)
        name = f"r{len(fleet.requests)}"
        prompt = [(7 * i + choice % 2) % VOCAB for i in range(size)]  # often cached
        router = fleet.routers[choice % len(fleet.routers)]
        request = Request(name, router, prompt, tokens, priority, has_grammar)
        prefillers = [each for each in fleet.names("p") if each not in fleet.silent]
        p = prefillers[choice % len(prefillers)] if is_remote and prefillers else None
        decoders = fleet.names("d")
        d = decoders[choice // 3 % len(decoders)]
        others = [each for each in fleet.workers if each != (p or d)]
        request.holder = others[holder % len(others)]
        fleet.ask(request, p, d)

    @rule(which=st.integers(0, 9), tokens=st.integers(1, 4), is_remote=st.booleans())
    def ask_elsewhere(self, which: int, tokens: int, is_remote: bool) -> None:
        """A prompt that has been computed comes to another worker, which may fetch."""
        fleet = self.fleet
        done = [each for each in fleet.requests.values() if each.outcome == "done"]
        if not done or len(self.open_requests()) >= MAX_OPEN:
            return
        old = done[-1 - which % len(done)]
        prompt = old.prompt[: max(1, self.longest - tokens)]
        request = Request(f"r{len(fleet.requests)}", old.router, prompt, tokens, 0, False)
        request.holder = old.d if which % 2 or old.p is None else old.p
        others = [each for each in fleet.workers if each != request.holder]
        decoders = [each for each in others if each[0] == "d"] or fleet.names("d")
        prefillers = [each for each in others if each[0] == "p" and each not in fleet.silent]
        p = prefillers[which % len(prefillers)] if is_remote and prefillers else None
        fleet.ask(request, p, decoders[which % len(decoders)])

    def open_requests(self) -> list[Request]:
        return [each for each in self.fleet.requests.values() if not each.outcome]

    @rule(choice=st.integers(0, 99))
    def client_goes_away(self, choice: int) -> None:
        requests = self.open_requests()
        if requests:
            self.fleet.abort(requests[choice % len(requests)])

    @rule(choice=st.integers(0, 99), count=st.integers(1, 6))
    def deliver(self, choice: int, count: int) -> None:
        busy = self.fleet.busy_channels()
        if busy:
            self.fleet.deliver(busy[choice % len(busy)], count)

    @rule(choice=st.integers(0, 99), turns=st.integers(1, 4))
    def turn(self, choice: int, turns: int) -> None:
        names = list(self.fleet.workers)
        for _ in range(turns):
            self.fleet.turn(names[choice % len(names)])

    @rule(count=st.integers(1, 4))
    def write(self, count: int) -> None:
        self.fleet.land_writes(count)

    @rule()
    def finish_writes(self) -> None:
        self.fleet.finish_writes()

    @rule(count=st.integers(1, 3))
    def compile(self, count: int) -> None:
        self.fleet.compile(count)

    @rule(count=st.integers(1, 3))
    def masks_are_there(self, count: int) -> None:
        self.fleet.give_masks(count)

    @rule(choice=st.integers(0, 99))
    def a_mask_is_late(self, choice: int) -> None:
        self.fleet.miss_mask(choice)

    @rule(rounds=st.integers(1, 3))
    def everything_goes_on(self, rounds: int) -> None:
        for _ in range(rounds):
            self.fleet.round()

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.3]))
    def time_passes(self, seconds: float) -> None:
        self.fleet.clock.now += seconds
        self.fleet.is_calm = False

    @rule(choice=st.integers(0, 99))
    def worker_dies(self, choice: int) -> None:
        names = list(self.fleet.workers)
        if self.may_fail and self.num_faults < 3:
            self.num_faults += 1
            self.fleet.kill(names[choice % len(names)])

    @rule(choice=st.integers(0, 99))
    def prefill_worker_stands_still(self, choice: int) -> None:
        names = self.fleet.names("p")
        if self.may_fail and self.num_faults < 3:
            self.num_faults += 1
            self.fleet.is_calm = False
            self.fleet.frozen.add(names[choice % len(names)])

    @rule(choice=st.integers(0, 99), is_held=st.booleans())
    def copies_stop_or_go_on(self, choice: int, is_held: bool) -> None:
        """A tier's thread is slow: nothing is copied between pool and host memory for a while."""
        workers = list(self.fleet.workers.values())
        workers[choice % len(workers)].tier_thread.is_held = is_held

    @rule()
    def silence_is_noticed(self) -> None:
        self.fleet.notice_silence()

    @rule()
    def it_goes_on(self) -> None:
        self.fleet.frozen.clear()
        self.fleet.notice_silence()

    @invariant()
    def blocks_have_their_owners(self) -> None:
        if hasattr(self, "fleet"):
            self.fleet.check_blocks()

    def teardown(self) -> None:
        if not hasattr(self, "fleet"):
            return
        fleet = self.fleet
        fleet.notice_silence()
        for bench in fleet.workers.values():
            bench.tier_thread.is_held = False
        finish_within_work(fleet, except_for_frozen=True)
        for name in sorted(fleet.frozen):
            fleet.kill(name)
        fleet.clock.now += LANDING_S
        finish_within_work(fleet)
        for request in fleet.requests.values():
            if request.outcome == "done":
                assert sorted(request.tokens) == list(range(request.max_tokens))
            if request.outcome == "refused":
                assert not fleet.is_calm
        fleet.close()


def finish_within_work(fleet: WorkerFleet, except_for_frozen: bool = False) -> None:
    """All requests end in a number of rounds that the work bounds. Time stands still, except where
    late writes must be given theirs to land, or a frozen worker does not serve a fetch: no other
    time-out can help. With `except_for_frozen` blocks may stay behind that a frozen worker
    holds."""
    work = sum(
        len(request.prompt) // BLOCK + 3 * request.max_tokens + 12
        for request in fleet.requests.values()
        if not request.outcome
    )
    for _ in range(12 + 4 * work):
        fleet.round()
        if fleet.awaits_landing:
            fleet.clock.now += LANDING_S / 4
        elif fleet.awaits_frozen_holder:
            fleet.clock.now += STOP_WAIT_S
        is_over = all(request.outcome for request in fleet.requests.values())
        if fleet.is_idle() or (except_for_frozen and is_over and fleet.frozen):
            return
    raise AssertionError(f"something is left over:\n{fleet.describe()}")


TestTightFleet = TightFleet.TestCase
TestTightFleet.settings = settings(
    max_examples=times(25, 2000),
    derandomize=not NIGHTLY,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
