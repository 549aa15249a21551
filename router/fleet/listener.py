"""What a fleet's owner implements to learn of workers' messages and of lost workers."""

from __future__ import annotations

from typing import Protocol

from protocol.control_message import ControlMessage
from router.fleet.worker import Loss, Worker


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
