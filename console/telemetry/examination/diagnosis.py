"""Runs the doctor: samples the fleet each second, and examines it every few seconds.

Examinations run in a thread, so that the event loop goes on; observations are immutable.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from console.doctor.doctor import Doctor, Examination
from console.doctor.observation import MIN_REQUESTS, WINDOW_S, Observation
from console.telemetry.examination.observer import FleetObserver

EXAMINE_S = 3
"""Seconds from one examination to the next."""


class Diagnosis:
    """The newest examination; `run` updates it."""

    def __init__(self, observer: FleetObserver) -> None:
        self._observer = observer
        self._doctor = Doctor()
        self._seen: Observation | None = None
        self._newest = Examination((), (), is_conclusive=False)

    async def run(self) -> None:
        """Sample and examine until cancelled."""
        second = 0
        while True:
            await asyncio.sleep(1.0)
            await self._observer.sample()
            second += 1
            if second % EXAMINE_S == 0:
                await self.examine()

    async def examine(self) -> None:
        """Examine the fleet now."""
        seen = self._observer.observe()
        self._newest = await asyncio.to_thread(self._doctor.examine, seen)
        self._seen = seen

    def observation_json(self) -> dict[str, Any] | None:
        """The body of `GET /doctor/observation`: the input of the newest examination; None before
        the first one."""
        seen = self._seen
        if seen is None:
            return None
        body: dict[str, Any] = msgspec.to_builtins(seen)
        return body

    def as_json(self) -> dict[str, Any]:
        """The body of `GET /doctor`."""
        seen = self._seen
        return {
            **self._newest.as_json(WINDOW_S, seen.now_us if seen else 0),
            "num_requests": len(seen.requests) if seen else 0,
            "min_requests": MIN_REQUESTS,
        }
