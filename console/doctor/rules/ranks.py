"""Ranks that are slower than the others of their worker, which wait for them in every step."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from console.doctor.finding import Change, Finding
from console.doctor.observation import Observation, WorkerFacts
from console.doctor.rules.pool_finding import PoolFinding, WorkerBars
from console.doctor.symptoms import MIN_STEPS, SERVING
from process.number_text import times

SLOW_RANK = 1.3
"""From this ratio of its time for the steps to that of the other ranks of its stage, a rank counts
as slow."""


@dataclass(frozen=True)
class _SlowRank:
    worker: WorkerFacts
    rank: int
    ratio: float


def slow_rank(seen: Observation) -> Finding | None:
    """The finding about the slowest rank of all workers; None if no rank is slow."""
    found = [each for each in map(_slowest, seen.workers) if each is not None]
    slow = max(found, key=lambda each: each.ratio, default=None)
    if slow is None or slow.ratio < SLOW_RANK:
        return None
    ratios = {each.worker.worker_id: each.ratio for each in found}
    name = slow.worker.worker_id
    return PoolFinding(
        rule="slow_worker",
        title=f"Rank {slow.rank} of {name} is slower than the worker's other ranks",
        text=(
            f"It takes {times(slow.ratio)} as long for its part of a step as the other ranks of "
            "its stage, which have as much to compute and wait for it. A throttled device, or "
            "cores that other processes use, are the usual causes.",
        ),
        bars=WorkerBars(
            "slowest rank's time over the others'",
            "×",
            [each.worker for each in found],
            lambda each: round(ratios[each.worker_id], 2),
            lambda each: each.worker_id == name,
        ),
        changes=(
            Change(
                setting="host",
                scope=name,
                text=f"Look at the cores or the device of its rank {slow.rank}: clocks, "
                "temperature, other processes.",
            ),
        ),
    ).to_finding(seen)


def _slowest(worker: WorkerFacts) -> _SlowRank | None:
    """The rank of a worker that is furthest behind the others of its stage. None if no stage has
    several ranks, or if they have computed too little."""
    size, busy = worker.tensor_parallel, worker.rank_busy_us
    if size < 2 or worker.num_steps < MIN_STEPS or worker.state not in SERVING:
        return None
    ratios = {}
    for rank, own in enumerate(busy):
        first = rank // size * size
        others = [*busy[first:rank], *busy[rank + 1 : first + size]]
        ratios[rank] = own / max(1, median(others or [own]))
    if not ratios:
        return None
    rank = max(ratios, key=lambda each: ratios[each])
    return _SlowRank(worker, rank, ratios[rank])
