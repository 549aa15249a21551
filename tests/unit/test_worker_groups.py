"""Workers whose layers keep windows: what a handoff and a fetch move of each group, and that the
tokens stay right. The fake model reads only what a layer's window shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from protocol.layout import first_covering
from scheduling import fetch_rule
from tests.layouts import windowed_layout
from tests.unit.fake_model import BLOCK, VOCAB
from tests.unit.worker_fleet import Request, WorkerFleet
from worker import served_fetches
from worker.counters import Count
from worker.inbound import fetches as fetches_module

WINDOWS = (9, 17)
"""Their covers are 2 and 4 blocks."""
LAYOUT = windowed_layout(BLOCK, *WINDOWS)
LONG = [(3 * i + i // 7) % VOCAB for i in range(20 * BLOCK)]


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerFleet]:
    monkeypatch.setattr(fetch_rule, "SLACK_S", 0.0)
    monkeypatch.setattr(fetches_module, "HOLDER_SHARE", 1.0)
    monkeypatch.setattr(fetches_module, "ALL_SHARE", 1.0)
    monkeypatch.setattr(served_fetches, "SERVE_SHARE", 1.0)
    made = WorkerFleet((1, 2, 1), (128, 128), layout=LAYOUT)
    yield made
    made.check_nothing_is_held()
    made.close()


def run(
    fleet: WorkerFleet, name: str, prompt: list[int], p: str | None, d: str, holder: str = ""
) -> None:
    """A request, from its start to its end; the fleet compares its tokens."""
    request = Request(name, fleet.routers[0], prompt, 3, 0, False, holder=holder)
    fleet.ask(request, p, d)
    for _ in range(80):
        if request.outcome and fleet.is_idle():
            break
        fleet.round()
        fleet.check_blocks()
    assert request.outcome == "done", fleet.describe()


def num_moved(num_tokens: int, num_cached: int = 0) -> int:
    """Blocks of all groups that a handoff moves to a worker that has so many cached tokens."""
    end, cached = -(-num_tokens // BLOCK), num_cached // BLOCK
    covers = [first_covering(num_tokens // BLOCK, BLOCK, each) for each in WINDOWS]
    return sum(end - max(cached, start) for start in (0, *covers))


@pytest.mark.parametrize("length", [1, 4, 9, 16, 31, 32, 33, 79, 80])
def test_a_handoff_moves_the_prompt_and_the_ends_of_the_windows(
    fleet: WorkerFleet, length: int
) -> None:
    run(fleet, "r", LONG[:length], "p1", "d2")
    d, p = fleet.workers["d2"], fleet.workers["p1"]
    assert d.counter(Count.PREFILL_TOKENS) == 0
    moved = num_moved(length)
    role = fleet.p("p1").role
    fleet.d("d2").role.load()
    assert (p.counter(Count.BLOCKS_SENT), d.counter(Count.BLOCKS_RECEIVED)) == (moved, moved)
    assert role.num_jobs == 0


@pytest.mark.parametrize("shared", [8, 40, 64])
def test_a_prefix_that_is_cached_on_both_workers_is_not_moved_again(
    fleet: WorkerFleet, shared: int
) -> None:
    run(fleet, "first", LONG[:shared], "p1", "d2")
    p = fleet.workers["p1"]
    sent, computed = p.counter(Count.BLOCKS_SENT), p.counter(Count.PREFILL_TOKENS)
    longer = LONG[: shared + 11]
    run(fleet, "second", longer, "p1", "d2")
    assert p.counter(Count.PREFILL_TOKENS) - computed == 11
    assert p.counter(Count.BLOCKS_SENT) - sent == num_moved(len(longer), shared)


@pytest.mark.parametrize("fetcher", ["p1", "d3"])
@pytest.mark.parametrize("length", [9, 12, 41, 80])
def test_what_another_worker_holds_is_fetched(
    fleet: WorkerFleet, length: int, fetcher: str
) -> None:
    run(fleet, "warm", LONG[:length], None, "d2")
    sent = fleet.workers["d2"].counter(Count.BLOCKS_SENT)
    run(fleet, "r", LONG[:length], "p1" if fetcher == "p1" else None, "d3", holder="d2")
    bench = fleet.workers[fetcher]
    run_blocks = (length - 1) // BLOCK
    assert bench.counter(Count.FETCHED_TOKENS) == run_blocks * BLOCK
    assert bench.counter(Count.PREFILL_TOKENS) == length - run_blocks * BLOCK
    moved = run_blocks + sum(min(-(-(each - 1) // BLOCK), run_blocks) for each in WINDOWS)
    assert fleet.workers["d2"].counter(Count.BLOCKS_SENT) - sent == moved


def test_a_fetch_behind_a_cached_prefix_lacks_nothing(fleet: WorkerFleet) -> None:
    """Of a window that reaches back into the prefix, only what is new moves."""
    run(fleet, "known", LONG[:40], None, "d3")
    run(fleet, "warm", LONG[:61], None, "d2")
    for name, end in (("r", 53), ("s", 61)):
        run(fleet, name, LONG[:end], None, "d3", holder="d2")
    assert fleet.workers["d3"].counter(Count.FETCHED_TOKENS) > 0


def test_a_holder_whose_window_has_gone_serves_up_to_the_last_end(fleet: WorkerFleet) -> None:
    run(fleet, "warm", LONG[:80], None, "d2")
    manager = fleet.workers["d2"].scheduler.pools.managers[1]
    manager.clear_cache()
    run(fleet, "r", LONG[:80], None, "d3", holder="d2")
    d3 = fleet.workers["d3"]
    assert (d3.counter(Count.FETCHES), d3.counter(Count.FETCHED_TOKENS)) == (1, 0)
    assert d3.counter(Count.PREFILL_TOKENS) == 80
