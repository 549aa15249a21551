"""One worker of the fleet: the view of it that placements use, its link, its rates and losses."""

from __future__ import annotations

from enum import Enum, auto
from math import inf
from typing import Any, Protocol

from protocol.events import WorkerStats
from protocol.message_base import Message
from protocol.registration import WorkerInfo
from router.fleet.clock_offset import ClockOffset
from router.fleet.conditions import (
    LOST_AFTER_US,
    SILENT,
    USABLE,
    Cause,
    Condition,
    State,
    registered_condition,
)
from router.fleet.worker_rates import Rates
from router.routing.worker_view import Liveness, Reservation, WorkerView

LONG_STEP_S = 8.0
"""A silence this much longer than usual may be a long step."""


class Link(Protocol):
    """The connection to a worker; implemented by `router.fleet.link.WorkerLink`."""

    clock: ClockOffset
    session: str
    num_legs: int
    trouble: Condition | None

    @property
    def is_ready(self) -> bool: ...
    @property
    def last_pong(self) -> int: ...
    @property
    def is_ending(self) -> bool: ...
    def is_responsive(self, now: float) -> bool: ...
    @property
    def silent_at(self) -> float: ...
    def send(self, message: Message) -> bool: ...
    def ping(self) -> int: ...
    async def wait_for_pong(self, number: int, timeout_s: float) -> None: ...
    def close(self) -> None: ...
    @property
    def is_closed(self) -> bool: ...
    async def wait_closed(self) -> None: ...


class Loss(Enum):
    """How a worker was lost. BROKEN: its connection broke, perhaps because a request killed the
    process. SILENT: it hung until its lease ended, or restarted as another incarnation; no request
    causes that."""

    BROKEN = auto()
    SILENT = auto()


class Worker(WorkerView):
    """A worker of the fleet. Owns its link."""

    def __init__(self, info: WorkerInfo, link: Link) -> None:
        super().__init__(info)
        self.link = link
        self.rates = Rates()
        self.broken_us = 0
        """The time when the connection broke, until it is back."""
        self.requests_moved = 0
        self.evicted_blocks = 0
        """Cached blocks evicted since the router has known this worker."""

    def update_liveness(self, now: float) -> float:
        """Update the liveness that placements see from the state of the link. Returns the time
        until which it holds, unless the link's readiness changes: any message ends a silence."""
        holds_until = -inf
        if not self.link.is_ready:
            liveness, holds_until = Liveness.UNCONNECTED, inf
        elif self.link.is_responsive(now):
            liveness, holds_until = Liveness.ANSWERS, self.link.silent_at
        else:
            is_slow = self.link.is_responsive(now - LONG_STEP_S)
            liveness = Liveness.SLOW if is_slow else Liveness.SILENT
        if liveness is not self.liveness:
            self.note_liveness(liveness)
        return holds_until

    def condition(self, now: float, wall_us: int) -> Condition:
        """The condition of this worker. A worker whose connection broke counts as lost a little
        later, although its lease may hold for a while."""
        reported = registered_condition(self.info.state)
        if reported is not None and (self.link.is_ready or reported.state is State.DRAINING):
            return reported
        if self.broken_us and wall_us - self.broken_us >= LOST_AFTER_US:
            return Condition(State.LOST, Cause.LOST, "its connection broke", self.broken_us)
        if self.link.trouble is not None:
            return self.link.trouble
        return USABLE if self.link.is_responsive(now) else SILENT

    def take_stats(self, stats: WorkerStats) -> None:
        """Take the newest stats; end the reservations that they include."""
        super().take_stats(stats)
        self.rates.observe(stats)

    def sent(self, reservation: Reservation) -> None:
        """Note that the request of a reservation has just been sent."""
        self.note_sent(reservation, self.link.session, self.link.num_legs)

    def as_json(self) -> dict[str, Any]:
        """This worker as `/fleet` shows it."""
        return {
            **describe(self.info, self.stats, is_connected=self.link.is_ready),
            "step_ms": self.rates.step_ms,
            "tokens_per_s": self.rates.tokens_per_s,
        }


def registered(info: WorkerInfo) -> dict[str, Any]:
    """A worker's registration as `/fleet` shows it."""
    return {
        "worker_id": info.worker_id,
        "role": info.role.value,
        "state": info.state.value,
        "host": info.host,
        "pid": info.pid,
        "control": info.control,
        "model": info.model,
        "transport": info.transport,
        "transport_paths": list(info.transport_paths),
        "incarnation": info.incarnation,
        "max_batch_size": info.max_batch_size,
        "blocks_total": info.num_blocks,
        "tensor_parallel": info.tensor_parallel,
        "pipeline_parallel": info.pipeline_parallel,
        "start_ms": info.start_ms,
    }


_TIERS = ("host_tier_bytes", "host_tier_used_bytes", "disk_tier_bytes", "disk_tier_used_bytes")


def describe(info: WorkerInfo, stats: WorkerStats | None, is_connected: bool) -> dict[str, Any]:
    """A worker as `/fleet` shows it; loads are 0 until the first stats arrive."""
    return {
        **registered(info),
        "num_waiting": stats.num_waiting if stats else 0,
        "num_running": stats.num_running if stats else 0,
        "queued_tokens": stats.queued_tokens if stats else 0,
        "blocks_used": stats.blocks_used if stats else 0,
        "blocks_cached": stats.blocks_cached if stats else 0,
        "blocks_retained": stats.blocks_retained if stats else 0,
        "blocks_waiting": stats.blocks_waiting if stats else 0,
        "blocks_stuck": stats.blocks_stuck if stats else 0,
        "num_handoffs": stats.num_handoffs if stats else 0,
        **{name: getattr(stats, name) if stats else 0 for name in _TIERS},
        "prefill_unreachable": bool(stats and stats.prefill_unreachable),
        "rank_busy_us": list(stats.rank_busy_us) if stats else [],
        "rank_wait_us": list(stats.rank_wait_us) if stats else [],
        "reported_us": stats.reported_us if stats else 0,
        "counters": stats.counters if stats else {},
        "connected": is_connected,
    }
