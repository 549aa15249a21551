"""A router process from its settings to its exit status: assemble, serve, stop in order.

Resources are closed in the reverse order of opening. The HTTP port is open from the start; the
API is available once the first decode worker's registration says what the fleet serves.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import sys
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from prometheus_client import CollectorRegistry

from process.allocator import give_back_large_blocks
from process.clock import wall_us
from process.garbage_collector import spare_the_collector
from process.lifecycle import StopSignal
from process.logs import setup_logs
from process.metrics import process_registry
from process.model_source import resolve_model
from process.settings import settings_or_exit
from process.sockets.network import Network
from process.store.membership import FleetWatcher
from protocol.errors import ConfigError, ModelLoadError
from protocol.messages import PROTOCOL_VERSION, Hello, Role
from protocol.registration import WorkerInfo
from router.api.admin import admin_router
from router.api.context import ApiLimits
from router.app import AppOptions, create_app
from router.fleet.cache_index import CacheIndex
from router.fleet.fleet import Fleet
from router.fleet.link import LinkCallbacks, LinkTimes, WorkerLink
from router.fleet.metrics import FleetMetrics
from router.http.access import KeyCheck, access_rules, warn_of_open_doors
from router.http.connection import BoundedProtocols, ConnectionLimits
from router.http.server import Doorway, HttpServer, TlsFiles, listen, url_of, write_port_file
from router.requests.dispatcher import Dispatcher
from router.requests.event_ids import ids_key
from router.requests.interface import ServedModel
from router.requests.trace import TraceStore
from router.settings import RouterSettings
from router.startup_app import LateApp, waiting_app
from router.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

SWEEPS = 4
"""Sweeps of the fleet per `silence_s`."""


def main(argv: Sequence[str]) -> int:
    """Run a router until it is told to stop; returns the exit status.

    A wrong setting, or a checkpoint without a usable tokenizer, prints one line on stderr and
    returns 2.
    """
    settings = settings_or_exit(
        RouterSettings,
        argv,
        prog="baton router",
        description="Serve the OpenAI-compatible API of a fleet of workers.",
        section="router",
    )
    setup_logs(settings.log_level, settings.log_format, "router")
    give_back_large_blocks()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(settings))
    except (ConfigError, ModelLoadError) as error:
        print(f"baton router: {error}", file=sys.stderr)
        return 2
    return 0


async def _run(settings: RouterSettings) -> None:
    """Serve until a signal comes. Raises ConfigError and ModelLoadError."""
    path = resolve_model(settings.model)
    async with AsyncExitStack() as stack:
        stop = _stop_event(settings, stack)
        tokenizer = Tokenizer(path)
        stack.callback(tokenizer.close)
        parts = _assemble(settings, stack)
        admin = admin_router(parts.fleet, parts.traces)
        app = LateApp(waiting_app(parts.registry, parts.fleet.not_ready_reason, [admin]))
        guarded = KeyCheck(app, access_rules(settings), parts.registry)
        watcher = FleetWatcher(settings.redis_url, settings.cluster, parts.fleet.update)
        listener = listen(settings.host, settings.port)
        stack.callback(listener.close)
        warn_of_open_doors(settings)
        server = HttpServer(
            guarded,
            _doorway(settings, parts.registry),
            settings.shutdown_grace_s,
            on_started=_announce(settings, listener),
            on_grace_over=parts.dispatcher.stop,
        )
        await _serve_beside(
            server.serve_until(stop, listener),
            stop,
            watcher.run(),
            _sweep(parts.fleet, min(settings.ping_interval_s, settings.silence_s / SWEEPS)),
            _open_api(settings, path, tokenizer, parts, app),
        )
    log.info("stopped")


@dataclass(frozen=True)
class _Parts:
    """The objects that the API and the operator's routes use."""

    registry: CollectorRegistry
    fleet: Fleet
    traces: TraceStore
    dispatcher: Dispatcher


def _stop_event(settings: RouterSettings, stack: AsyncExitStack) -> asyncio.Event:
    """An event that is set when a signal arrives or the parent process ends."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = StopSignal(lambda: _wake(loop, stop), settings.parent_pid)
    stack.callback(signals.close)
    return stop


def _wake(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    loop.call_soon_threadsafe(stop.set)


def _assemble(settings: RouterSettings, stack: AsyncExitStack) -> _Parts:
    """Create and connect fleet, traces and dispatcher; `stack` closes the fleet's links."""
    registry = process_registry()
    metrics = FleetMetrics(registry)
    network = Network(settings.cluster_secret)
    stack.callback(network.close)
    name = f"router-{uuid.uuid4().hex[:6]}"
    times = LinkTimes(settings.ping_interval_s, settings.silence_s)

    def connect(info: WorkerInfo, callbacks: LinkCallbacks) -> WorkerLink:
        hello = Hello(
            sender=name,
            role=Role.ROUTER,
            protocol_version=PROTOCOL_VERSION,
            model_fingerprint=info.model_fingerprint,
            layout_fingerprint="",
        )
        return WorkerLink(network, info, hello, callbacks, times, metrics)

    fleet = Fleet(connect, CacheIndex(settings.expected_cache_s), metrics)
    stack.push_async_callback(fleet.close)
    traces = TraceStore(settings.trace_history, metrics, wall_us)
    dispatcher = Dispatcher(settings, fleet, traces, metrics, random.Random())
    fleet.listen(dispatcher)
    return _Parts(registry, fleet, traces, dispatcher)


def _doorway(settings: RouterSettings, registry: CollectorRegistry) -> Doorway:
    limits = ConnectionLimits(
        settings.max_head_bytes,
        settings.max_body_bytes,
        settings.receive_timeout_s,
        settings.client_stall_s,
    )
    return Doorway(BoundedProtocols(limits, registry), _tls_of(settings))


def _tls_of(settings: RouterSettings) -> TlsFiles | None:
    cert = settings.tls_cert_file
    return None if cert is None else TlsFiles(cert, settings.tls_key_file)


def _announce(settings: RouterSettings, listener: socket.socket) -> Callable[[], None]:
    """A callback that logs the URL and writes the port file once the server listens."""
    url, port = url_of(listener, _tls_of(settings)), listener.getsockname()[1]

    def on_started() -> None:
        log.info("listening on %s", url)
        if settings.port_file is not None:
            write_port_file(settings.port_file, port)

    return on_started


async def _sweep(fleet: Fleet, interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        fleet.sweep()


async def _open_api(
    settings: RouterSettings, path: Path, tokenizer: Tokenizer, parts: _Parts, app: LateApp
) -> None:
    """Wait for the first decode worker, then serve its model's API. Raises ModelLoadError."""
    fleet = parts.fleet
    await fleet.wait_for_decode()
    identity = fleet.identity
    assert identity is not None, "a decode worker is ready"
    name = settings.served_model_name or identity.model
    model = ServedModel(name, path, _context_of(fleet), created=int(time.time()))
    options = AppOptions(
        extra_routers=[admin_router(fleet, parts.traces)],
        trace_of=parts.traces.get,
        limits=ApiLimits(settings.request_timeout_s, settings.max_body_bytes, settings.keepalive_s),
        tool_parser=settings.tool_parser,
        reasoning_parser=settings.reasoning_parser,
        ids_key=ids_key(settings.cluster_secret),
    )
    app.serve(
        create_app(
            parts.dispatcher, tokenizer, model, parts.registry, fleet.not_ready_reason, options
        )
    )
    spare_the_collector()
    log.info("serving %s, context %d tokens", name, model.max_context)


def _context_of(fleet: Fleet) -> Callable[[], int]:
    """Returns the context that every ready decode worker accepts; while there is none, the last
    known value."""
    known = fleet.max_context

    def context() -> int:
        nonlocal known
        known = fleet.max_context or known
        assert known is not None, "a decode worker was ready"
        return known

    return context


async def _serve_beside(
    serving: Coroutine[Any, Any, None], stop: asyncio.Event, *helpers: Coroutine[Any, Any, None]
) -> None:
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
