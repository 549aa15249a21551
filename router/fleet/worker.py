"""One worker as the router knows it: registration, link, last stats, and recent reservations.

A request that was just sent is not in the worker's stats yet, so it counts here as a reservation.
The worker may have made the first stats message after the sending before it received the request,
but not the second. A reservation therefore ends with the second one, unless its owner releases it
earlier.
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
    """How a worker was lost. A request may kill a worker's process, which breaks the connection
    (BROKEN). No request makes a worker hang until its lease ends, or restart as another
    incarnation (SILENT)."""

    BROKEN = auto()
    SILENT = auto()


@dataclass(eq=False)
class Reservation:
    """Load that was sent to a worker and is not in the worker's stats yet."""

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
        """Whether new requests may go there: its lease says READY and it accepted our hello."""
        return self.info.state is WorkerState.READY and self.link.is_ready

    @property
    def num_reservations(self) -> int:
        """Requests sent that the stats may not count yet."""
        return len(self._reservations)

    @property
    def free_blocks(self) -> int:
        """Unused blocks, by the last stats and the requests sent since."""
        used = self.stats.blocks_used if self.stats else 0
        return self.info.num_blocks - used - sum(each.blocks for each in self._reservations)

    def take_stats(self, stats: WorkerStats) -> None:
        """Take the newest stats; end the reservations that they must include."""
        self.stats = stats
        for each in self._reservations:
            each.stats_seen += 1
        self._reservations = [
            each for each in self._reservations if each.stats_seen < _STATS_UNTIL_COUNTED
        ]

    def reserve(self, tokens: int, blocks: int) -> Reservation:
        """Reserve load for a request sent now: prompt tokens to compute, blocks to hold."""
        reservation = Reservation(tokens, blocks)
        self._reservations.append(reservation)
        return reservation

    def release(self, reservation: Reservation) -> None:
        """End a reservation: its request is done there or was never sent. May be called again."""
        if reservation in self._reservations:
            self._reservations.remove(reservation)

    def load(self, match: PrefixMatch) -> WorkerLoad:
        """The load for a placement: the last stats plus the reservations."""
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
        """This worker as `/fleet` shows it."""
        return describe(self.info, self.stats, is_connected=self.link.is_ready)


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
        "blocks_total": info.num_blocks,
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
        "num_handoffs": stats.num_handoffs if stats else 0,
        "reported_us": stats.reported_us if stats else 0,
        "counters": stats.counters if stats else {},
        "connected": is_connected,
    }
