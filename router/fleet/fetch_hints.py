"""The workers from which a prompt's leading blocks may be fetched: hints for the worker that
computes the prompt, which decides by itself.

Only blocks that a worker holds now count, not blocks that it is expected to compute.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping

from protocol.messages import KvHolder, KvPeer
from protocol.registration import WorkerState
from router.fleet.fleet import Fleet
from router.fleet.worker import Worker
from router.routing.caches.cache_index import PrefixMatch

MAX_HOLDERS = 2
MAX_ATTEMPT = 2
"""Later attempts get no hints, so that a prompt that kills holders does not reach all of them."""
MIN_GAIN = 2
"""A holder must have at least this many blocks more than the computing worker has in its pool and
tiers."""
NEAR_TIE = 0.05
"""Holders count as equally good if their blocks differ by less than this part of the most."""


def holders_for(
    fleet: Fleet,
    matches: Mapping[str, PrefixMatch],
    computing: Worker,
    decode: Worker,
    failed: Collection[str],
    rng: random.Random,
) -> list[KvHolder]:
    """The best holders for the worker `computing`, of a request that continues on `decode`. In
    near-ties, `decode` comes first, then neighbours of `computing`, then the least loaded."""
    own = matches.get(computing.worker_id)
    least = (own.num_own if own is not None else 0) + MIN_GAIN
    found = [
        (match.held, worker)
        for name, match in matches.items()
        if match.held >= least
        and (worker := fleet.worker(name)) is not None
        and _can_serve(fleet, worker, computing, failed)
    ]
    if not found:
        return []
    most = max(held for held, _ in found)

    def rank(each: tuple[int, Worker]) -> tuple[int, bool, bool, int, float]:
        held, worker = each
        near = bool(worker.info.machine) and worker.info.machine == computing.info.machine
        running = worker.stats.num_running if worker.stats is not None else 0
        return -int(held / most / NEAR_TIE), worker is not decode, not near, running, rng.random()

    found.sort(key=rank)
    return [KvHolder(peer=peer_of(each), num_blocks=held) for held, each in found[:MAX_HOLDERS]]


def peer_of(worker: Worker) -> KvPeer:
    """A worker, as messages to other workers name it."""
    info = worker.info
    return KvPeer(worker_id=info.worker_id, incarnation=info.incarnation, control=info.control)


def _can_serve(fleet: Fleet, worker: Worker, computing: Worker, failed: Collection[str]) -> bool:
    info = worker.info
    return (
        worker is not computing
        and info.state in (WorkerState.READY, WorkerState.DRAINING)
        and worker.link.is_ready
        and info.incarnation not in failed
        and not fleet.why_apart(worker.worker_id, computing.worker_id)
    )
