"""The common part of findings about a pool of workers: one bar for each worker, and changes that
several rules propose. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from console.doctor.finding import Bar, Change, Evidence, Finding, Number
from console.doctor.observation import Observation, WorkerFacts
from console.doctor.symptoms import urgency


@dataclass(frozen=True)
class WorkerBars:
    """One bar for each worker of a pool, of `value` in `unit`."""

    kind: str
    unit: str
    pool: Sequence[WorkerFacts]
    value: Callable[[WorkerFacts], float]
    is_flagged: Callable[[WorkerFacts], bool] = lambda worker: False

    def evidence(self, numbers: Sequence[Number]) -> Evidence:
        """The bars with some numbers below them."""
        bars = (Bar(each.worker_id, self.value(each), self.is_flagged(each)) for each in self.pool)
        return Evidence(kind=self.kind, unit=self.unit, bars=tuple(bars), numbers=tuple(numbers))


@dataclass(frozen=True)
class PoolFinding:
    """A finding about a pool, before its urgency is known."""

    rule: str
    title: str
    text: tuple[str, ...]
    bars: WorkerBars
    changes: tuple[Change, ...]
    numbers: tuple[Number, ...] = ()

    def to_finding(self, seen: Observation) -> Finding:
        """The finding, with the urgency that goodput requires."""
        return Finding(
            rule=self.rule,
            title=self.title,
            text=self.text,
            urgency=urgency(seen),
            evidence=self.bars.evidence(self.numbers),
            changes=self.changes,
        )


def one_more_worker(pool_name: str, num_workers: int, text: str) -> Change:
    """The change to one worker more than `num_workers`."""
    return Change(
        setting=f"{pool_name} workers",
        scope=f"{pool_name} pool",
        old=str(num_workers),
        new=str(num_workers + 1),
        text=text,
    )


def kv_in_fp8(seen: Observation, text: str) -> tuple[Change, ...]:
    """The change to KV of half the bytes on decode workers; none if they have it."""
    old = seen.settings.get("kv_dtype")
    if old == "fp8":
        return ()
    return (Change(setting="kv_dtype", scope="decode pool", new="fp8", old=old, text=text),)
