"""Members of a fleet of fake workers: their ids, changes and silence."""

from __future__ import annotations

import msgspec

from protocol.messages import Role
from tests.unit.router.router_harness import Harness


def ids(harness: Harness, role: Role) -> list[str]:
    return [each.worker_id for each in harness.fleet.ready(role)]


def last_heard(harness: Harness, link, at: float) -> None:
    """Let a worker have been silent since then, which the fleet did not foresee."""
    link._last_heard = at
    harness.fleet.on_readiness()


def change(harness: Harness, worker_id: str, **fields) -> None:
    worker = harness.workers[worker_id]
    worker.info = msgspec.structs.replace(worker.info, **fields)
    harness.refresh()
