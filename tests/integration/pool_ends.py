"""Ends of transports in one process, whose events a test waits for."""

from __future__ import annotations

import time

from kv_transfer.transports.interface import Transport

_DEADLINE_S = 20.0


class PoolEnd:
    """A worker's transport and the events that it has reported."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.events: list[object] = []

    def poll(self) -> None:
        """Make progress."""
        self.events += self.transport.poll()


def poll_until(kind: type, end: PoolEnd, *others: PoolEnd) -> None:
    """Let the ends take turns until the first one has reported an event of this kind."""
    deadline = time.monotonic() + _DEADLINE_S
    while not any(isinstance(event, kind) for event in end.events):
        assert time.monotonic() < deadline, f"no {kind.__name__}: {end.events}"
        for each in (end, *others):
            each.poll()
