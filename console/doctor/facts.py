"""What a router knows of its fleet without percentiles: no fact needs a minimum number of requests.

Made of plain values, like the rest of an observation. Times `_us` are microseconds of the Unix
epoch; 0 if unknown. Counts of keys are those of the last minute.
"""

from __future__ import annotations

import msgspec

from protocol.messages import Role

TAKEN = 0.7
"""From this share of a worker's places or blocks in use, requests count as waiting for them,
because large requests do not fit into the rest."""
UNUSABLE = ("stalled", "silent", "not connected", "refused", "lost")
"""Conditions of workers that are faults (`router.fleet.conditions`)."""


class _Facts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    pass


class WorkerStanding(_Facts, frozen=True, kw_only=True, omit_defaults=True):
    """One worker, its condition, and its last report. A lost worker `is_replaced` once another one
    of its role has come. A decode worker that reaches no prefill worker computes prompts itself."""

    worker_id: str
    role: Role
    condition: str = "usable"
    cause: str | None = None
    reason: str | None = None
    since_us: int = 0
    is_replaced: bool = False
    num_waiting: int = 0
    num_running: int = 0
    max_batch_size: int | None = None
    blocks_total: int = 0
    blocks_used: int = 0
    prefill_unreachable: bool = False

    @property
    def is_crowded(self) -> bool:
        """Whether it has more requests than places in its batch."""
        return lacks_places(self.num_running, self.num_waiting, self.max_batch_size)

    @property
    def is_usable(self) -> bool:
        """Whether requests may go there."""
        return self.condition == "usable"

    @property
    def is_missed(self) -> bool:
        """Whether the fleet lacks this worker because of a fault."""
        return self.condition in UNUSABLE and not self.is_replaced


class KeyFacts(_Facts, frozen=True, kw_only=True, omit_defaults=True):
    """The requests of one key in the last minute; `name` is empty where there are no keys.

    The numbers of requests that were served (`accepted`), refused at the key's limit (`limited`,
    429), invalid (other 4xx), without room or failed (`refused`, 5xx), or abandoned by the client
    (`left`). Of the `ended` requests that count for goodput, `good` met both targets. `waiting`
    requests now wait for their first token, `late` of them for longer than the target.
    """

    name: str = ""
    accepted: int = 0
    limited: int = 0
    invalid: int = 0
    refused: int = 0
    left: int = 0
    ended: int = 0
    good: int = 0
    waiting: int = 0
    late: int = 0


class StoreFacts(_Facts, frozen=True, kw_only=True, omit_defaults=True):
    """The trouble with the store, in words."""

    trouble: str
    since_us: int = 0


class RouterFacts(_Facts, frozen=True, kw_only=True, omit_defaults=True):
    """Another router that has fallen silent."""

    name: str
    since_us: int = 0


class HostFacts(_Facts, frozen=True, kw_only=True, omit_defaults=True):
    """The CPU of one machine over the last seconds.

    `waiting_share`: the part of their runnable time in which the fleet's processes waited for a
    core. `busy_cores`: the cores that all processes of the machine use; `own_cores`: those that the
    fleet's processes use. `throttled_share`: the part of the time in which a CPU limit held them
    up.
    """

    name: str
    waiting_share: float
    busy_cores: float
    own_cores: float
    throttled_share: float = 0.0
    processes: tuple[str, ...] = ()
    since_us: int = 0


class LogFacts(_Facts, frozen=True, kw_only=True, omit_defaults=True):
    """A process, `router` or a worker's id, that cannot write its log now; `lost` lines so far."""

    process: str
    lost: int
    since_us: int = 0


class TierFacts(_Facts, frozen=True, kw_only=True, omit_defaults=True):
    """A tier of a worker, `host memory` or `disk`, in which blocks failed in the last minute:
    `failures` since the first one."""

    worker_id: str
    tier: str
    failures: int
    since_us: int = 0


class ApartFacts(_Facts, frozen=True, kw_only=True, omit_defaults=True):
    """A usable prefill worker that cannot hand over to a usable decode worker, and why."""

    prefill: str
    decode: str
    reason: str
    since_us: int = 0


class LoopFacts(_Facts, frozen=True, kw_only=True, omit_defaults=True):
    """How late this router's event loop ran timers in the last seconds: the median, and the
    maximum. A request waits for such a delay several times."""

    lag_ms: float
    worst_ms: float


class Facts(_Facts, frozen=True, kw_only=True, omit_defaults=True):
    """The facts of one moment."""

    workers: tuple[WorkerStanding, ...] = ()
    keys: tuple[KeyFacts, ...] = ()
    store: StoreFacts | None = None
    routers: tuple[RouterFacts, ...] = ()
    hosts: tuple[HostFacts, ...] = ()
    logs: tuple[LogFacts, ...] = ()
    tiers: tuple[TierFacts, ...] = ()
    loop: LoopFacts | None = None
    apart: tuple[ApartFacts, ...] = ()

    def pool(self, role: Role) -> list[WorkerStanding]:
        """The workers of a role, usable or not."""
        return [each for each in self.workers if each.role is role]

    def usable(self, role: Role) -> list[WorkerStanding]:
        """The workers of a role that get requests."""
        return [each for each in self.pool(role) if each.is_usable]

    def missed(self, role: Role) -> list[WorkerStanding]:
        """The workers of a role that the fleet lacks."""
        return [each for each in self.pool(role) if each.is_missed]


def lacks_places(running: int, waiting: int, places: int | None) -> bool:
    """Whether a worker has more requests than places in its batch, and most places are taken:
    otherwise they wait for memory, or for their prompts."""
    if not places:
        return False
    return running + waiting > places and running >= TAKEN * places
