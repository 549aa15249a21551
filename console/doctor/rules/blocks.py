"""Workers with far fewer KV blocks than the others of their pool."""

from __future__ import annotations

from statistics import median

from console.doctor.client_goodput import clients_of
from console.doctor.facts import WorkerStanding
from console.doctor.finding import Bar, Change, Evidence, Finding, Number, Urgency
from console.doctor.observation import Observation
from process.number_text import count, integer
from protocol.messages import Role

FEW = 0.25
"""The share of the other workers' blocks below which a worker has too few."""


def check_few_blocks(seen: Observation) -> Finding | str | None:
    """Whether a worker has too few blocks, so that requests avoid it or wait there."""
    pools = [seen.facts.usable(role) for role in (Role.DECODE, Role.PREFILL)]
    for pool in pools:
        few = [each for each in pool if _has_few(each, pool)]
        if few:
            return _finding(seen, few[0], pool)
    sizes = [each.blocks_total for pool in pools for each in pool]
    return f"{integer(min(sizes))} to {count(max(sizes), 'block')} on a worker" if sizes else None


def _has_few(worker: WorkerStanding, pool: list[WorkerStanding]) -> bool:
    return 0 < worker.blocks_total < FEW * _usual(worker, pool)


def _usual(worker: WorkerStanding, pool: list[WorkerStanding]) -> float:
    others = [each.blocks_total for each in pool if each is not worker]
    return median(others) if others else 0.0


def _finding(seen: Observation, worker: WorkerStanding, pool: list[WorkerStanding]) -> Finding:
    name, usual = worker.worker_id, _usual(worker, pool)
    is_suffering = clients_of(seen.facts).suffer(seen.targets.goodput)
    return Finding(
        rule="few_blocks",
        title=f"{name} has too few KV blocks",
        text=(
            f"It has {count(worker.blocks_total, 'block')}, the others of its pool "
            f"{integer(usual)} (median). Prompts that do not fit go to the others, which "
            "carry its share.",
        ),
        urgency=Urgency.URGENT if is_suffering else Urgency.SOON,
        evidence=Evidence(
            kind="KV blocks, by worker",
            unit="blocks",
            bars=tuple(Bar(each.worker_id, each.blocks_total, each is worker) for each in pool),
            numbers=(Number(integer(worker.num_waiting), "requests wait there"),),
        ),
        changes=(
            Change(
                setting="num_blocks",
                scope=name,
                old=str(worker.blocks_total),
                new=str(round(usual)),
                text="As the others have; or a larger memory_fraction, where that is set. Look at "
                "what else uses its memory.",
            ),
        ),
    )
