"""One worker as the router knows it: registration, link, last stats, and what was just sent there.

A request that was sent is not in the worker's stats yet; until it must be, it is counted here as
a reservation. The first stats message after sending may have been made before receipt, the
second was not, so that is when a reservation ends, if its owner did not release it before.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

from protocol.events import WorkerStats
from protocol.messages import Message, Role
from protocol.registration import WorkerInfo, WorkerState
from router.fleet.cache_index import PrefixMatch
from router.routing.view import WorkerLoad

_STATS_UNTIL_COUNTED = 2


class Link(Protocol):
    """The connection to a worker, as `router.fleet.link.WorkerLink` implements it."""

    @property
    def is_ready(self) -> bool: ...
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
    """How a worker was lost. A request may end its process, which breaks its connection; none
    makes it stand still until its lease ends, or come back as another."""

    BROKEN = auto()
    SILENT = auto()


@dataclass(eq=False)
class Reservation:
    """Load that was sent to a worker and is not in its stats yet."""

    tokens: int
    blocks: int
    stats_seen: int = 0


class Worker:
    """A worker of the fleet. Owns its link."""

    def __init__(self, info: WorkerInfo, link: Link) -> None:
        self.info = info
        self.link = link
        self.stats: WorkerStats | None = None
        self._reservations: list[Reservation] = []

    @property
    def worker_id(self) -> str:
        return self.info.worker_id

    @property
    def role(self) -> Role:
        return self.info.role

    @property
    def takes_requests(self) -> bool:
        """Whether new requests may go there: READY by its lease, and its hello accepted."""
        return self.info.state is WorkerState.READY and self.link.is_ready

    @property
    def num_reservations(self) -> int:
        """Requests sent that its stats may not count yet."""
        return len(self._reservations)

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody uses, by its last stats and what was sent there since."""
        used = self.stats.blocks_used if self.stats else 0
        return self.info.num_blocks - used - sum(each.blocks for each in self._reservations)

    def take_stats(self, stats: WorkerStats) -> None:
        """Its newest load; reservations that it must include end."""
        self.stats = stats
        for each in self._reservations:
            each.stats_seen += 1
        self._reservations = [
            each for each in self._reservations if each.stats_seen < _STATS_UNTIL_COUNTED
        ]

    def reserve(self, tokens: int, blocks: int) -> Reservation:
        """Count a request that goes there now: prompt tokens to compute, blocks to hold."""
        reservation = Reservation(tokens, blocks)
        self._reservations.append(reservation)
        return reservation

    def release(self, reservation: Reservation) -> None:
        """The request is done there, or never came to it. May be called again."""
        if reservation in self._reservations:
            self._reservations.remove(reservation)

    def load(self, match: PrefixMatch) -> WorkerLoad:
        """Its load for a placement: the last stats and the reservations on top."""
        stats = self.stats
        tokens = sum(each.tokens for each in self._reservations)
        blocks = sum(each.blocks for each in self._reservations)
        return WorkerLoad(
            worker_id=self.worker_id,
            num_requests=(stats.num_waiting + stats.num_running if stats else 0)
            + len(self._reservations),
            queued_tokens=(stats.queued_tokens if stats else 0) + tokens,
            blocks_total=self.info.num_blocks,
            blocks_used=(stats.blocks_used if stats else 0) + blocks,
            held_blocks=match.held,
            expected_blocks=match.expected,
            max_context=self.info.max_context,
        )

    def as_json(self) -> dict[str, Any]:
        """What `/fleet` shows of it."""
        return describe(self.info, self.stats, is_connected=self.link.is_ready)


def registered(info: WorkerInfo) -> dict[str, Any]:
    """What its registration tells of a worker, as `/fleet` shows it."""
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
        "blocks_total": info.num_blocks,
    }


def describe(info: WorkerInfo, stats: WorkerStats | None, is_connected: bool) -> dict[str, Any]:
    """A worker as `/fleet` shows it; loads are 0 until its first stats."""
    return {
        **registered(info),
        "num_waiting": stats.num_waiting if stats else 0,
        "num_running": stats.num_running if stats else 0,
        "queued_tokens": stats.queued_tokens if stats else 0,
        "blocks_used": stats.blocks_used if stats else 0,
        "blocks_cached": stats.blocks_cached if stats else 0,
        "num_handoffs": stats.num_handoffs if stats else 0,
        "reported_us": stats.reported_us if stats else 0,
        "counters": stats.counters if stats else {},
        "connected": is_connected,
    }
