"""Runs the doctor: samples the fleet and checks facts each second, and judges every few seconds.

Examinations run in a thread, so that the event loop goes on; observations are immutable.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from console.doctor.doctor import Doctor, Examination
from console.doctor.observation import MIN_REQUESTS, WINDOW_S, Observation
from console.telemetry.examination.observer import FleetObserver
from console.telemetry.fleet_report import FleetReport

EXAMINE_S = 3
"""Seconds from one judgement to the next."""


class Diagnosis:
    """The newest examination, from which the report takes its headline; `run` updates both."""

    def __init__(self, observer: FleetObserver, report: FleetReport) -> None:
        self._observer, self._report = observer, report
        self._doctor = Doctor()
        self._seen: Observation | None = None
        self._newest = Examination((), (), is_conclusive=False)

    async def run(self) -> None:
        """Sample and examine until cancelled."""
        second = 0
        while True:
            await asyncio.sleep(1.0)
            await self._observer.sample()
            await (self.check_facts() if second % EXAMINE_S else self.examine())
            second += 1

    async def examine(self) -> None:
        """Examine the fleet now."""
        self._seen = seen = self._observer.observe()
        self._take(await asyncio.to_thread(self._doctor.examine, seen))

    async def check_facts(self) -> None:
        """Check the current facts; judgements stay. Call `examine` before."""
        assert self._seen is not None
        self._seen = seen = self._report.stamped(self._seen)
        self._take(await asyncio.to_thread(self._doctor.check_facts, seen))

    def _take(self, examination: Examination) -> None:
        self._newest = examination
        self._report.set_headline(examination.findings)

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
            "headline": self._report.headline.as_json(),
            **self._newest.as_json(WINDOW_S, seen.now_us if seen else 0),
            "num_requests": len(seen.requests) if seen else 0,
            "min_requests": MIN_REQUESTS,
        }
