"""The callbacks by which links report to a fleet, and a fleet to its owner."""

from __future__ import annotations

from typing import Protocol

from protocol.control_message import ControlMessage
from protocol.events import EventMessage
from router.fleet.worker import Loss, Worker


class LinkCallbacks(Protocol):
    """Receives a link's reports, by worker id."""

    def on_ready(self, worker_id: str) -> None:
        """The worker accepted our hello."""
        ...

    def on_disconnected(self, worker_id: str) -> None:
        """The connection broke; messages sent or expected over it are lost."""
        ...

    def on_readiness(self) -> None:
        """Whether a link is ready may have changed."""
        ...

    def on_control(self, worker_id: str, message: ControlMessage) -> None:
        """A message arrived over the control connection."""
        ...

    def on_event(self, worker_id: str, message: EventMessage) -> None:
        """A published message arrived."""
        ...


class FleetListener(Protocol):
    """Receives workers' messages about requests, and news of changed or lost workers."""

    def on_message(self, worker: Worker, message: ControlMessage) -> None:
        """A worker has sent a message about a request."""
        ...

    def on_fleet(self) -> None:
        """Workers have come, left, or changed their state or load. May be called repeatedly."""
        ...

    def on_lost(self, worker: Worker, reason: str, loss: Loss) -> int:
        """A worker, or the connection to it, is lost: end every attempt there. Returns the number
        of these attempts."""
        ...
