"""A router process from its settings to its exit status: assemble, serve, stop in order.

Resources are closed in the reverse order of opening. The HTTP port is open from the start; the API
is available once the first decode worker has registered and so determined the model.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop
from prometheus_client import CollectorRegistry

from checkpoint.model_source import TEXT_PATTERNS, model_name, resolve_model
from checkpoint.texts_fingerprint import texts_fingerprint
from checkpoint.trial import start_trial
from gateway.http.access import warn_of_open_doors
from gateway.http.certificates import TlsFiles
from gateway.http.connection import BoundedProtocols
from gateway.http.connection_limits import ConnectionLimits
from gateway.http.lame_duck import LameDuck
from gateway.http.server import Doorway, HttpServer, listen, url_of, write_port_file
from gateway.text.tokenizer import Tokenizer
from process.allocator import give_back_large_blocks
from process.lifecycle import StopSignal
from process.logs import setup_logs
from process.open_files import MOST_FILES, allow_open_files
from process.settings import settings_or_exit, warn_of_unknown_variables
from process.side_tasks import keep_running
from process.store.fleet_watcher import FleetWatcher
from process.store.router_leases import RouterLease
from process.store.store_url import store_url
from protocol.error_line import one_line
from protocol.errors import ConfigError, ModelLoadError
from router.fleet.conditions import StoreState
from router.fleet.election import WantedModel
from router.fleet.fleet import Fleet
from router.requests.interface import ReadinessCheck
from router_process.front import Front
from router_process.parts import (
    Parts,
    assemble,
    board_of,
    dashboard_of,
    load_channel_of,
    operators_of,
)
from router_process.settings import RouterSettings
from router_process.side_work import SideWork, measurements, reload_certificate, serve_beside

log = logging.getLogger(__name__)

THREAD_TURN_S = 0.001
"""How long a thread computes before it yields to a waiting event loop. Several threads may check
schemas and tokenize at once; each turn of the loop waits for all of these threads several times."""


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
    )
    setup_logs(settings.log_level, settings.log_format, "router")
    warn_of_unknown_variables(RouterSettings)
    give_back_large_blocks()
    allow_open_files(MOST_FILES)
    sys.setswitchinterval(THREAD_TURN_S)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(settings))
    except (ConfigError, ModelLoadError) as error:
        print(f"baton router: {one_line(error)}", file=sys.stderr)
        return 2
    return 0


async def _run(settings: RouterSettings) -> None:
    """Serve until a signal comes. Raises ConfigError and ModelLoadError."""
    path = resolve_model(settings.model, settings.revision, patterns=TEXT_PATTERNS)
    start_trial("gateway.checkpoint_trial", path).finish()
    async with AsyncExitStack() as stack:
        tokenizer = Tokenizer(path)
        stack.callback(tokenizer.close)
        hangup = asyncio.Event()
        stop = _stop_event(settings, stack, hangup)
        parts = assemble(settings, stack)
        parts.fleet.want(_wanted_model(settings, path))
        duck = LameDuck(settings.lame_duck_s)
        dashboard = dashboard_of(settings, parts, tokenizer)
        operators = [*operators_of(parts), *dashboard.routers(settings.root_path)]
        front = Front(settings, path, tokenizer, parts, _readiness(duck, parts.fleet), operators)
        listener = listen(settings.host, settings.port)
        stack.callback(listener.close)
        warn_of_open_doors(settings)
        server = HttpServer(
            front.app,
            _doorway(settings, parts.registry),
            settings.shutdown_grace_s,
            on_started=_announce(settings, listener),
            on_grace_over=parts.dispatcher.stop,
        )
        front.work_after_answers(server.wait_for)
        leave = asyncio.Event()
        await serve_beside(
            server.serve_until(leave, listener),
            leave,
            duck.wait(stop, leave, server.close_after_answers),
            keep_running("reloading the certificate", lambda: reload_certificate(server)),
            keep_running("the dashboard", lambda: dashboard.run(stop)),
            *_store_work(settings, parts),
            *front.side_work(hangup),
            *measurements(settings, parts),
            front.open_api(),
        )
    log.info("stopped")


def _store_work(settings: RouterSettings, parts: Parts) -> list[SideWork]:
    """The connections to the store: the fleet's members, the board, this router's lease."""
    url, cluster = store_url(settings), settings.cluster
    watcher = FleetWatcher(url, cluster, parts.fleet.update, ignored=parts.ignored)
    parts.fleet.store_state = lambda: StoreState(watcher.trouble, watcher.notice)
    parts.metrics.store_connected.set_function(lambda: watcher.is_connected)
    parts.metrics.store_certificate_end.set_function(lambda: watcher.certificate_end)
    return [
        keep_running("watching the fleet", watcher.run),
        keep_running("telling other routers", board_of(settings, parts).run),
        keep_running("telling of sent requests", load_channel_of(settings, parts).run),
        keep_running("the router's lease", RouterLease(url, cluster, parts.name).run),
    ]


def _stop_event(
    settings: RouterSettings, stack: AsyncExitStack, hangup: asyncio.Event
) -> asyncio.Event:
    """An event that is set when a signal arrives or the parent process ends; SIGHUP sets `hangup`
    instead."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = StopSignal(
        lambda: _wake(loop, stop), settings.parent_pid, lambda: _wake(loop, hangup)
    )
    stack.callback(signals.close)
    return stop


def _wake(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    loop.call_soon_threadsafe(stop.set)


def _doorway(settings: RouterSettings, registry: CollectorRegistry) -> Doorway:
    limits = ConnectionLimits(
        settings.max_head_bytes,
        settings.max_body_bytes,
        settings.receive_timeout_s,
        settings.client_stall_s,
        settings.idle_timeout_s,
        settings.min_body_rate,
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


def _wanted_model(settings: RouterSettings, path: Path) -> WantedModel:
    """The model whose workers this router serves: that of its checkpoint."""
    name = next(iter(settings.served_model_name), None)
    fingerprint = texts_fingerprint(path)
    return WantedModel(name or model_name(settings.model), fingerprint, is_named=name is not None)


def _readiness(duck: LameDuck, fleet: Fleet) -> ReadinessCheck:
    """A check that says why requests should go elsewhere: the router is stopping, or has no workers
    for them."""
    return lambda: duck.not_ready_reason() or fleet.not_ready_reason()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
