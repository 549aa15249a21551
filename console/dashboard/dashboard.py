"""The dashboard of one router: its pages, stream and controls."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter

from console.dashboard.control_log import ControlLog
from console.dashboard.controls import ControlParts, controls_router
from console.dashboard.feed import Feed, Source
from console.dashboard.live_limits import live_settings
from console.dashboard.pages import pages_router
from console.dashboard.sample_prompts import Encode, SamplePrompts
from console.dashboard.stream_endpoint import stream_router
from console.dashboard.summary import shown_summary
from console.telemetry.fleet_report import FleetReport
from process.clock import wall_us
from process.settings.shared import SharedSettings
from process.store.store_url import store_url
from protocol.messages import Role
from router.fleet.fleet import Fleet
from router.requests.dispatcher import Dispatcher


@dataclass(frozen=True)
class DashboardParts:
    """The objects that the dashboard shows and changes. `sources` has the sources of further views
    of the stream, by the view's name: `doctor` and `cache`."""

    settings: SharedSettings
    fleet: Fleet
    report: FleetReport
    dispatcher: Dispatcher
    encode: Encode
    sources: Mapping[str, Source]


class Dashboard:
    """Owns the feed of summaries, the test prompts, and the log of changes."""

    def __init__(self, parts: DashboardParts) -> None:
        cluster, report = parts.settings.cluster, parts.report
        offers = ("fleet", "requests", "controls", *parts.sources)

        def fleet_summary() -> dict[str, Any]:
            return shown_summary(report.as_json(), cluster, offers, wall_us())

        self._feed = Feed({"fleet": fleet_summary, **parts.sources})
        self._prompts = SamplePrompts(parts.dispatcher, parts.encode, parts.fleet)
        self._controls = ControlParts(
            redis_url=store_url(parts.settings),
            cluster=cluster,
            fleet=parts.fleet,
            settings=live_settings(parts.report, parts.fleet),
            prompts=self._prompts,
            log=ControlLog(wall_us),
            preview=lambda worker_id: pressure_without(worker_id, parts.fleet, parts.report),
        )

    def routers(self, root_path: str) -> list[APIRouter]:
        """The routes, for an application that clients see under `root_path`."""
        pages = pages_router(root_path)
        return [stream_router(self._feed), controls_router(self._controls), pages]

    async def run(self, stop: asyncio.Event) -> None:
        """Build summaries until `stop` is set; then end every reader and every test prompt."""
        try:
            await self._feed.run(stop)
        finally:
            await self._prompts.close()


def pressure_without(
    worker_id: str | None, fleet: Fleet, report: FleetReport
) -> dict[str, float | None]:
    """The pressure of each pool if this worker took no new requests and the others of its pool
    shared its load. Without a `worker_id`, the current pressures. A pressure is None if it is
    unknown, or if the pool would have no worker left."""
    now = report.as_json()["pressure"]
    predicted = {role.value: now[role.value] for role in (Role.PREFILL, Role.DECODE)}
    worker = None if worker_id is None else fleet.worker(worker_id)
    if worker is not None:
        role, left = worker.role, len(fleet.ready(worker.role)) - 1
        value = predicted[role.value]
        predicted[role.value] = value * (left + 1) / left if value is not None and left else None
    return predicted
