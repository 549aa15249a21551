"""Conversations on a fleet's workers, and the drain of one of them."""

from __future__ import annotations

from tests.unit.fake_model import BLOCK
from tests.unit.worker_fleet import Request, WorkerFleet, peer_of
from tests.unit.worker_harness import Bench
from worker.counters import Count

POOL = 64


def talk(
    fleet: WorkerFleet, name: str, prompt: list[int], d: str = "d2", p: str | None = None
) -> Request:
    """A conversation's turn, on a decode worker alone unless a prefill worker is named."""
    request = Request(name, fleet.routers[0], prompt, 2, 0, False)
    fleet.ask(request, p, d)
    for _ in range(30):
        fleet.round()
        if request.outcome and fleet.is_idle():
            break
    assert request.outcome == "done", fleet.describe()
    return request


def prompt_of(first: int, num_blocks: int) -> list[int]:
    return [first, *[(3 * i + first) % 11 for i in range(num_blocks * BLOCK)]]


def drain(fleet: WorkerFleet, name: str, *takers: str) -> Bench:
    """The worker is told to stop; these others are ready."""
    for each in takers:
        fleet.workers[name].peers.others.append(peer_of(each))
        fleet.workers[each].peers.others.append(peer_of(name))
    leaver = fleet.workers[name]
    leaver.stop.request()
    assert not has_ended(leaver), "it announces the drain"
    return leaver


def has_ended(bench: Bench) -> bool:
    role = bench.role  # type: ignore[attr-defined]
    return bench.host.lifecycle.is_finished(role.num_jobs)


def run_until_ended(fleet: WorkerFleet, bench: Bench) -> None:
    for _ in range(60):
        fleet.clock.now += 0.02
        fleet.round()
        fleet.check_blocks()
        if has_ended(bench):
            return
    raise AssertionError(f"it stays: {fleet.describe()}")


def computes(fleet: WorkerFleet, d: str, prompt: list[int]) -> int:
    """How many tokens of a prompt a worker computes."""
    before = fleet.workers[d].counter(Count.PREFILL_TOKENS)
    talk(fleet, f"again on {d}: {len(fleet.requests)}", prompt, d)
    return fleet.workers[d].counter(Count.PREFILL_TOKENS) - before
