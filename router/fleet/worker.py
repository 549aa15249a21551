"""One worker as the router knows it: registration, link, last stats, and recent reservations.

The worker's stats do not include a request that was just sent, so the request counts here as a
reservation. Stats and requests use different connections, without a common order, so stats say how
many requests they count. A reservation ends with the first stats that count its request, unless its
owner releases it earlier.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

from protocol.events import WorkerStats
from protocol.messages import Message, Role
from protocol.registration import WorkerInfo, WorkerState
from router.fleet.cache_index import PrefixMatch
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
from router.fleet.rates import Rates
from router.routing.prediction import WorkerSpeed
from router.routing.view import WorkerLoad

_CHUNK_TOKENS, _ITL_TARGET_MS = 512, 50.0  # of workers that do not report them


class Link(Protocol):
    """The connection to a worker; implemented by `router.fleet.link.WorkerLink`."""

    clock: ClockOffset
    session: str
    num_legs: int
    trouble: Condition | None

    @property
    def is_ready(self) -> bool: ...
    @property
    def is_ending(self) -> bool: ...
    def is_responsive(self, now: float) -> bool: ...
    def send(self, message: Message) -> bool: ...
    def ping(self) -> int: ...
    def has_answered(self, number: int) -> bool: ...
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


@dataclass(eq=False)
class Reservation:
    """Load that was sent to a worker whose stats do not include it yet. `number` counts the
    requests that `session` has sent; 0 until this one is sent."""

    tokens: int
    blocks: int
    session: str = ""
    number: int = 0

    def is_counted(self, received: dict[str, int]) -> bool:
        """Whether stats with these numbers of received requests include this one."""
        return 0 < self.number <= received.get(self.session, 0)


class Worker:
    """A worker of the fleet. Owns its link."""

    def __init__(self, info: WorkerInfo, link: Link) -> None:
        self.info = info
        self.link = link
        self.stats: WorkerStats | None = None
        self.speed: WorkerSpeed | None = None
        self.rates = Rates()
        self.broken_us = 0
        """The time when the connection broke, until it is back."""
        self.requests_moved = 0
        self.evicted_blocks = 0
        """Cached blocks evicted since the router has known this worker."""
        self._reservations: set[Reservation] = set()
        self._reserved_tokens = self._reserved_blocks = 0

    @property
    def worker_id(self) -> str:
        return self.info.worker_id

    @property
    def role(self) -> Role:
        return self.info.role

    @property
    def takes_requests(self) -> bool:
        """Whether new requests may go to this worker: its lease says READY and it accepted our
        hello."""
        return self.info.state is WorkerState.READY and self.link.is_ready

    def condition(self, now: float, wall_us: int) -> Condition:
        """The condition of this worker. A worker whose connection broke counts as lost a little
        later, although its lease may hold for a while."""
        told = registered_condition(self.info.state)
        if told is not None and (self.link.is_ready or told.state is State.DRAINING):
            return told
        if self.broken_us and wall_us - self.broken_us >= LOST_AFTER_US:
            return Condition(State.LOST, Cause.LOST, "its connection broke", self.broken_us)
        if self.link.trouble is not None:
            return self.link.trouble
        return USABLE if self.link.is_responsive(now) else SILENT

    @property
    def num_reservations(self) -> int:
        """Number of sent requests that the stats may not include yet."""
        return len(self._reservations)

    @property
    def free_blocks(self) -> int:
        """Blocks that are neither used nor waited for, by the last stats and the requests sent
        since."""
        return self.info.num_blocks - self._claimed_blocks

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that the worker still has to compute, including requests sent since its
        stats."""
        queued = self.stats.queued_tokens if self.stats is not None else 0
        return queued + self._reserved_tokens

    @property
    def _claimed_blocks(self) -> int:
        """Blocks that are used (including granted and fenced ones), waited for, or reserved. The
        queue of a prefill worker counts by its tokens instead."""
        stats, reserved = self.stats, self._reserved_blocks
        if stats is None:
            return reserved
        waiting = stats.blocks_waiting if self.role is Role.DECODE else 0
        return stats.blocks_used + waiting + reserved

    def take_stats(self, stats: WorkerStats) -> None:
        """Take the newest stats; end the reservations that they include."""
        self.stats = stats
        self.speed = _speed(self.info, stats)
        self.rates.observe(stats)
        for each in [e for e in self._reservations if e.is_counted(stats.received)]:
            self.release(each)

    def reserve(self, tokens: int, blocks: int) -> Reservation:
        """Reserve load for a request: prompt tokens to compute, blocks to hold."""
        reservation = Reservation(tokens, blocks)
        self._reservations.add(reservation)
        self._reserved_tokens += tokens
        self._reserved_blocks += blocks
        return reservation

    def sent(self, reservation: Reservation) -> None:
        """Note that the request of a reservation has just been sent."""
        reservation.session, reservation.number = self.link.session, self.link.num_legs

    def release(self, reservation: Reservation) -> None:
        """End a reservation: its request is over there or was never sent. May be called again."""
        if reservation in self._reservations:
            self._reservations.remove(reservation)
            self._reserved_tokens -= reservation.tokens
            self._reserved_blocks -= reservation.blocks

    def load(self, match: PrefixMatch) -> WorkerLoad:
        """The load for a placement: the last stats plus the reservations."""
        stats = self.stats
        return WorkerLoad(
            worker_id=self.worker_id,
            num_requests=(stats.num_waiting + stats.num_running if stats else 0)
            + len(self._reservations),
            queued_tokens=self.queued_tokens,
            blocks_total=self.info.num_blocks,
            blocks_claimed=self._claimed_blocks,
            blocks_stuck=stats.blocks_stuck if stats else 0,
            held_blocks=match.held,
            expected_blocks=match.expected,
            max_context=self.info.max_context,
            speed=self.speed,
        )

    def as_json(self) -> dict[str, Any]:
        """This worker as `/fleet` shows it."""
        return {
            **describe(self.info, self.stats, is_connected=self.link.is_ready),
            "step_ms": self.rates.step_ms,
            "tokens_per_s": self.rates.tokens_per_s,
        }


def _speed(info: WorkerInfo, stats: WorkerStats) -> WorkerSpeed:
    """What predictions need to know about a worker. Assumes that the contexts of the decoding
    sequences fill the blocks in use."""
    is_decode = info.role is Role.DECODE
    return WorkerSpeed(
        fixed_us=stats.step_fixed_us,
        per_token_us=stats.step_per_token_us,
        per_attended_us=stats.step_per_attended_us,
        chunk_max_tokens=info.chunk_max_tokens or _CHUNK_TOKENS,
        itl_target_ms=info.itl_target_ms or _ITL_TARGET_MS,
        num_decodes=stats.num_running if is_decode else 0,
        context_tokens=stats.blocks_used * info.block_size if is_decode else 0,
        proven_tokens=_proven_tokens(stats.counters),
    )


def _proven_tokens(counters: dict[str, int]) -> int:
    """The prompt tokens that a worker has computed, if its step model's errors were at most half of
    its total step time; otherwise 0."""
    took_us, error_us = counters.get("step_us", 0), counters.get("step_error_us", 0)
    return counters.get("prefill_tokens", 0) if 0 < took_us >= 2 * error_us else 0


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
        "start_ms": info.start_ms,
    }


def describe(info: WorkerInfo, stats: WorkerStats | None, is_connected: bool) -> dict[str, Any]:
    """A worker as `/fleet` shows it; loads are 0 until the first stats arrive."""
    return {
        **registered(info),
        "num_waiting": stats.num_waiting if stats else 0,
        "num_running": stats.num_running if stats else 0,
        "queued_tokens": stats.queued_tokens if stats else 0,
        "blocks_used": stats.blocks_used if stats else 0,
        "blocks_cached": stats.blocks_cached if stats else 0,
        "blocks_waiting": stats.blocks_waiting if stats else 0,
        "blocks_stuck": stats.blocks_stuck if stats else 0,
        "num_handoffs": stats.num_handoffs if stats else 0,
        "prefill_unreachable": bool(stats and stats.prefill_unreachable),
        "reported_us": stats.reported_us if stats else 0,
        "counters": stats.counters if stats else {},
        "connected": is_connected,
    }
