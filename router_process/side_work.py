"""A router's work beside answering: periodic tasks, and running them while the server serves."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Coroutine
from typing import Any

from console.telemetry.caches.cache_report import CacheReport
from console.telemetry.fleet_report import FleetReport
from gateway.http.server import HttpServer
from process.clock import clock_step_us
from process.open_files import FileRoom
from process.side_tasks import keep_running
from protocol.flight import FlightKind
from router.fleet.fleet import Fleet
from router_process.parts import Parts
from router_process.settings import RouterSettings

log = logging.getLogger(__name__)

SideWork = Coroutine[Any, Any, None]

SAMPLE_S = 1.0
LAG_S = 0.1
"""The mean time between two timers that show how late the event loop is. The times vary by up to a
half, because a CPU limit stops a process every 100 ms, and regular timers might always fall between
the stops."""
RECORDED_LAG_S = 0.05
RECORDED_STEP_US = 1_000_000
INDEX_S, BUSY_INDEX_S = 0.1, 0.01
"""The index of caches is updated this often: the first time is used without long lists to index,
the second one with them."""
SWEEPS = 4
"""Sweeps of the fleet per `silence_s`."""


async def serve_beside(serving: SideWork, stop: asyncio.Event, *helpers: SideWork) -> None:
    """Serve while the helpers run; a helper's failure stops everything and is raised."""

    def on_end(task: asyncio.Task[None]) -> None:
        if _failure_of(task) is not None:
            stop.set()

    tasks = [asyncio.create_task(each) for each in helpers]
    for task in tasks:
        task.add_done_callback(on_end)
    try:
        await serving
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in tasks:
        failure = _failure_of(task)
        if failure is not None:
            raise failure


def _failure_of(task: asyncio.Task[None]) -> BaseException | None:
    return None if task.cancelled() else task.exception()


def measurements(settings: RouterSettings, parts: Parts) -> list[SideWork]:
    """The tasks that measure this router and the fleet, and that send measurements elsewhere."""
    sweep_s = min(settings.ping_interval_s, settings.silence_s / SWEEPS)
    work = [
        keep_running("sweeping the fleet", lambda: _sweep(parts.fleet, sweep_s)),
        keep_running("indexing caches", lambda: keep_indexing(parts.fleet)),
        keep_running("measuring load", lambda: _sample(parts.report, parts.cache)),
        keep_running("the doctor", parts.diagnosis.run),
        keep_running("measuring lag", lambda: watch_lag(parts)),
    ]
    if parts.exporter is not None:
        work.append(keep_running("exporting traces", parts.exporter.run))
    return work


async def reload_certificate(server: HttpServer) -> None:
    """Read the certificate again whenever its files change; returns at once without TLS."""
    reloader = server.certificate_reloader()
    if reloader is not None:
        await reloader.run()


async def _sweep(fleet: Fleet, interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        fleet.sweep()


async def keep_indexing(fleet: Fleet) -> None:
    """Index the caches of workers that joined, and forget those of workers that left, a little at a
    time."""
    while True:
        await asyncio.sleep(BUSY_INDEX_S if fleet.tidy_index() else INDEX_S)


async def _sample(report: FleetReport, cache: CacheReport) -> None:
    step_us, files = 0, FileRoom()
    while True:
        await asyncio.sleep(SAMPLE_S)
        files.check()
        report.sample()
        cache.sample()
        step_us = log_clock_step(step_us, clock_step_us())


def log_clock_step(known_us: int, step_us: int) -> int:
    """Log that the system clock was set since the last call; returns the step to pass to the next
    one. Both are readings of `clock_step_us`."""
    if abs(step_us - known_us) < RECORDED_STEP_US:
        return known_us
    if abs(step_us) < RECORDED_STEP_US:
        log.info("the system clock agrees with this router's own clock again")
        return step_us
    side = "ahead of" if step_us > 0 else "behind"
    log.warning(
        "the system clock was set, or the machine slept: it is %.0f s %s this router's own clock, "
        "by which the times in traces and in /fleet go on; add clock.step_us of /fleet to them",
        abs(step_us) / 1e6, side,
    )  # fmt: skip
    return step_us


async def watch_lag(parts: Parts) -> None:
    """Measure how late the event loop runs its timers, and record when one was very late."""
    loop = asyncio.get_running_loop()
    while True:
        pause_s = LAG_S * random.uniform(0.5, 1.5)
        due = loop.time() + pause_s
        await asyncio.sleep(pause_s)
        lag_s = max(0.0, loop.time() - due)
        parts.metrics.loop_lag.observe(lag_s)
        parts.report.loop_lag.add(lag_s)
        if lag_s >= RECORDED_LAG_S:
            parts.recorder.note(FlightKind.LAGGED, since=time.monotonic() - lag_s)
