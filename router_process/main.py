"""A router process from its settings to its exit status: assemble, serve, stop in order.

Resources are closed in the reverse order of opening. The HTTP port is open from the start; the API
is available once the first decode worker has registered and so determined the model.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import sys
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from fastapi import APIRouter
from prometheus_client import CollectorRegistry

from checkpoint.model_source import TEXT_PATTERNS, model_name, resolve_model
from checkpoint.texts_fingerprint import texts_fingerprint
from checkpoint.trial import start_trial
from console.dashboard.dashboard import Dashboard, DashboardParts
from console.endpoints.fleet import admin_router, doctor_router, flight_router
from console.metrics import FleetCollector, VllmNames
from console.telemetry.caches.cache_report import CacheReport
from console.telemetry.examination.diagnosis import Diagnosis
from console.telemetry.examination.observer import FleetObserver
from console.telemetry.flight import FlightReport
from console.telemetry.otlp import OtlpExporter
from console.telemetry.report import FleetReport
from console.telemetry.request_log import RequestLog
from console.telemetry.targets import Targets
from gateway.admission.gate import Gate
from gateway.admission.key_files import KeyFiles
from gateway.admission.shared_prefixes import SharedPrefixes
from gateway.api.context import ApiLimits
from gateway.api.openai_responses.background import BackgroundRuns
from gateway.api.openai_responses.memory import ResponseMemory, records_of
from gateway.history.assembly import RouterAnswers, router_answers
from gateway.http.access import KeyCheck, access_rules, warn_of_open_doors
from gateway.http.browsers import BrowserCheck, browser_rules
from gateway.http.certificates import TlsFiles
from gateway.http.connection import BoundedProtocols
from gateway.http.connection_limits import ConnectionLimits
from gateway.http.lame_duck import LameDuck
from gateway.http.server import Doorway, HttpServer, listen, url_of, write_port_file
from gateway.output.event_ids import ids_key
from gateway.parser_names import ALLOW
from gateway.shared_prefixes_file import load_shared_prefixes
from gateway.text.tokenizer import Tokenizer
from http_kit.door import Door
from process.clock import wall_us
from process.flight_recorder import FlightRecorder
from process.lifecycle import StopSignal
from process.logs import setup_logs
from process.memory import give_back_large_blocks, spare_the_collector
from process.metrics.metrics_server import process_registry
from process.settings import settings_or_exit, warn_of_unknown_variables
from process.side_tasks import keep_running
from process.sockets.network import Network
from process.store.ignored_entries import IgnoredEntries
from process.store.membership import FleetWatcher
from process.store.router_board import RouterBoard
from process.store.router_leases import RouterLease
from process.store.store_url import store_url
from protocol.error_line import one_line
from protocol.errors import ConfigError, ModelLoadError
from protocol.flight import FlightKind
from protocol.messages import PROTOCOL_VERSION, Hello, Role
from protocol.registration import WorkerInfo
from router.fleet.cache_index import CacheIndex
from router.fleet.election import WantedModel
from router.fleet.fleet import Fleet
from router.fleet.history import FleetHistory
from router.fleet.link import LinkCallbacks, LinkTimes, WorkerLink
from router.metrics import FleetMetrics
from router.requests.dispatcher import Dispatcher
from router.requests.interface import ReadinessCheck, ServedModel
from router.requests.trace import TraceStore
from router.requests.trace_json import timing_lookup
from router_process.app import AppOptions, create_app
from router_process.settings import RouterSettings
from router_process.startup_app import LateApp, waiting_app

log = logging.getLogger(__name__)

THREAD_TURN_S = 0.001
"""How long a thread computes before it yields to a waiting event loop. Several threads may check
schemas and tokenize at once, and each turn of the loop waits for all of them several times."""
MIDDLE_PER_FULL = 1000
"""Collections of the middle generation between two full ones. A full collection visits every object
of every request, which takes 0.3 s for a million objects, and finds almost nothing: requests leave
no cycles."""
SAMPLE_S = 1.0
LAG_S = 0.1
RECORDED_LAG_S = 0.05
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
    warn_of_unknown_variables(RouterSettings)
    give_back_large_blocks()
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
        parts = _assemble(settings, stack)
        parts.fleet.want(_wanted_model(settings, path))
        duck = LameDuck(settings.lame_duck_s)
        ready = _readiness(duck, parts.fleet)
        dashboard = _dashboard(settings, parts, tokenizer)
        operators = [*_operators(parts), *dashboard.routers(settings.root_path)]
        prefixes = load_shared_prefixes(settings, tokenizer)
        key_files = KeyFiles(parts.registry)
        rules = access_rules(settings, key_files)
        gate = Gate(settings.max_inflight, time.monotonic, lambda: len(rules.api), parts.registry)
        waiting = LateApp(waiting_app(parts.registry, ready, operators, settings.root_path))
        responses = _responses(settings, parts.registry, parts.ignored)
        answers = _answers(settings, tokenizer, path, parts)
        front = _Front(waiting, ready, operators, gate, responses, prefixes, answers)
        keyed = KeyCheck(front.app, rules, parts.registry)
        guarded = BrowserCheck(keyed, browser_rules(settings), parts.registry)
        watcher = FleetWatcher(
            store_url(settings), settings.cluster, parts.fleet.update, ignored=parts.ignored
        )
        lease = RouterLease(store_url(settings), settings.cluster, parts.name)
        sweep_s = min(settings.ping_interval_s, settings.silence_s / SWEEPS)
        parts.fleet.watch_store(lambda: watcher.trouble, lambda: watcher.notice)
        board = _board(settings, parts)
        parts.metrics.store_connected.set_function(lambda: watcher.is_connected)
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
        if front.responses is not None:
            front.responses.memory.adopt = server.wait_for
        leave = asyncio.Event()
        await _serve_beside(
            server.serve_until(leave, listener),
            leave,
            duck.wait(stop, leave, server.close_after_answers),
            keep_running("reloading the certificate", lambda: _reload_certificate(server)),
            keep_running("reading key files", lambda: key_files.run(hangup)),
            keep_running("watching the fleet", watcher.run),
            keep_running("telling other routers", board.run),
            keep_running("the router's lease", lease.run),
            *(
                keep_running(what, each.run)
                for what, each in (
                    ("exporting traces", parts.exporter),
                    ("keeping responses", front.responses),
                    ("remembering answers", front.answers),
                )
                if each is not None
            ),
            keep_running("sweeping the fleet", lambda: _sweep(parts.fleet, sweep_s)),
            keep_running("measuring load", lambda: _sample(parts.report, parts.cache)),
            keep_running("the doctor", parts.diagnosis.run),
            keep_running("measuring lag", lambda: _watch_lag(parts.metrics, parts.recorder)),
            keep_running("the dashboard", lambda: dashboard.run(stop)),
            _open_api(settings, path, tokenizer, parts, front),
        )
    log.info("stopped")


def _board(settings: RouterSettings, parts: _Parts) -> RouterBoard:
    """The board on which routers tell each other of their load, and answer questions about what
    operators changed."""
    shown_name = f"{parts.name} ({socket.gethostname()}, pid {os.getpid()})"
    board = RouterBoard(
        store_url(settings),
        settings.cluster,
        lambda: msgspec.json.encode(parts.report.summary(parts.log.shared_rows(), shown_name)),
        parts.report.peers.take,
        parts.log.answer,
        parts.ignored,
    )
    parts.log.ask = board.ask
    return board


def _responses(
    settings: RouterSettings, registry: CollectorRegistry, ignored: IgnoredEntries
) -> BackgroundRuns | None:
    """The memory of responses, if it is enabled."""
    if not settings.responses_store:
        return None
    records = records_of(store_url(settings), settings.cluster, settings.responses_store_bytes)
    return BackgroundRuns(ResponseMemory(records, registry, ignored), registry)


def _answers(
    settings: RouterSettings, tokenizer: Tokenizer, path: Path, parts: _Parts
) -> RouterAnswers | None:
    """The memory of answers, if it is enabled."""
    peers = parts.report.peers
    return router_answers(
        settings,
        tokenizer,
        texts_fingerprint(path),
        parts.registry,
        parts.ignored,
        lambda: bool(peers.summaries),
    )


@dataclass(frozen=True)
class _Front:
    """The parts that answer HTTP: an application that waits for the fleet, and what the next
    application needs. `gate` counts the requests of clients, `responses` keeps responses,
    `prefixes` are shared by all clients, `answers` remembers the ids of answers."""

    app: LateApp
    ready: ReadinessCheck
    operators: list[APIRouter]
    gate: Gate
    responses: BackgroundRuns | None
    prefixes: SharedPrefixes
    answers: RouterAnswers | None


@dataclass(frozen=True)
class _Parts:
    """The objects that the API and the operator's routes use."""

    name: str
    registry: CollectorRegistry
    metrics: FleetMetrics
    fleet: Fleet
    traces: TraceStore
    dispatcher: Dispatcher
    report: FleetReport
    log: RequestLog
    exporter: OtlpExporter | None
    diagnosis: Diagnosis
    cache: CacheReport
    recorder: FlightRecorder
    ignored: IgnoredEntries
    door: Door


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

    fleet = Fleet(
        connect, CacheIndex(settings.expected_cache_s), metrics, history=FleetHistory(wall_us)
    )
    stack.push_async_callback(fleet.close)
    traces = TraceStore(settings.trace_history, metrics, wall_us)
    cache = CacheReport(fleet, traces)
    dispatcher = Dispatcher(settings, fleet, traces, metrics, random.Random(), cache.placed)
    recorder = FlightRecorder(time.monotonic, wall_us)
    dispatcher.on_refused = lambda name, reason: recorder.note(
        FlightKind.REFUSED, (name, 0), text=reason
    )
    fleet.listen(dispatcher)
    ignored = IgnoredEntries()
    registry.register(ignored)
    door = Door(time.perf_counter)
    report = FleetReport(fleet, traces, Targets.of(settings), ignored, door)
    exporter = None
    if settings.otlp_endpoint is not None:
        ratio = settings.otlp_sample_ratio
        exporter = OtlpExporter(settings.otlp_endpoint, ratio, registry, name)
        traces.on_end(exporter.take)
    registry.register(FleetCollector(report))
    if settings.vllm_metric_names:
        registry.register(VllmNames(registry, fleet, next(iter(settings.served_model_name), None)))
    observer = FleetObserver(
        fleet, traces, report, cache, lambda: _shown_settings(dispatcher), random.Random()
    )
    requests = RequestLog(traces, report.peers)
    return _Parts(
        name, registry, metrics, fleet, traces, dispatcher, report, requests, exporter,
        Diagnosis(observer), cache, recorder, ignored, door,
    )  # fmt: skip


def _dashboard(settings: RouterSettings, parts: _Parts, tokenizer: Tokenizer) -> Dashboard:
    return Dashboard(
        DashboardParts(
            settings,
            parts.fleet,
            parts.report,
            parts.dispatcher,
            partial(tokenizer.encode_async, add_special_tokens=True),
            sources={"doctor": parts.diagnosis.as_json, "cache": parts.cache.as_json},
        )
    )


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


def _warn_of_deprecated(settings: RouterSettings) -> None:
    if settings.local_prefill_threshold_tokens is not None:
        log.warning(
            "local_prefill_threshold_tokens is deprecated, and the next release ignores it: the "
            "cost of a placement decides whether a decode worker computes a prompt"
        )


def _readiness(duck: LameDuck, fleet: Fleet) -> ReadinessCheck:
    """Why requests should go elsewhere: the router stops, or it has no workers for them."""
    return lambda: duck.not_ready_reason() or fleet.not_ready_reason()


async def _reload_certificate(server: HttpServer) -> None:
    reloader = server.certificate_reloader()
    if reloader is not None:
        await reloader.run()


async def _sweep(fleet: Fleet, interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        fleet.sweep()


async def _sample(report: FleetReport, cache: CacheReport) -> None:
    while True:
        await asyncio.sleep(SAMPLE_S)
        report.sample()
        cache.sample()


def _shown_settings(dispatcher: Dispatcher) -> dict[str, str]:
    """The current values for findings that propose new ones."""
    threshold = dispatcher.local_prefill_threshold_tokens
    return {} if threshold is None else {"local_prefill_threshold_tokens": str(threshold)}


def _operators(parts: _Parts) -> list[APIRouter]:
    return [
        admin_router(parts.report, parts.log),
        doctor_router(parts.diagnosis, parts.cache),
        flight_router(FlightReport(parts.fleet, parts.traces, parts.recorder)),
    ]


async def _watch_lag(metrics: FleetMetrics, recorder: FlightRecorder) -> None:
    """Measure how late the event loop runs its timers, and record when one was very late."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_S
        await asyncio.sleep(LAG_S)
        lag_s = max(0.0, loop.time() - due)
        metrics.loop_lag.observe(lag_s)
        if lag_s >= RECORDED_LAG_S:
            recorder.note(FlightKind.LAGGED, since=time.monotonic() - lag_s)


async def _open_api(
    settings: RouterSettings,
    path: Path,
    tokenizer: Tokenizer,
    parts: _Parts,
    front: _Front,
) -> None:
    """Wait for the first decode worker, then serve its model's API. Raises ModelLoadError."""
    fleet = parts.fleet
    await fleet.wait_for_decode()
    identity = fleet.identity
    assert identity is not None, "a decode worker is ready"
    name, *others = settings.served_model_name or (identity.model,)
    model = ServedModel(name, path, _context_of(fleet), int(time.time()), tuple(others))
    options = AppOptions(
        extra_routers=front.operators,
        timing_of=timing_lookup(parts.traces),
        limits=ApiLimits(
            settings.request_timeout_s,
            settings.max_body_bytes,
            settings.keepalive_s,
            settings.max_inflight_bytes,
            refuse_unknown=settings.unknown_fields == "refuse",
        ),
        tool_parser=settings.tool_parser,
        reasoning_parser=settings.reasoning_parser,
        allow_control_tokens=settings.control_tokens_in_text == ALLOW,
        ids_key=ids_key(settings.cluster_secret),
        tracer=parts.exporter,
        gate=front.gate,
        responses=front.responses,
        shared_prefixes=front.prefixes,
        answers=None if front.answers is None else front.answers.memory,
        root_path=settings.root_path,
        door=parts.door,
    )
    front.app.serve(
        create_app(parts.dispatcher, tokenizer, model, parts.registry, front.ready, options)
    )
    spare_the_collector(MIDDLE_PER_FULL)
    log.info("serving %s, context %d tokens", name, model.max_context)
    _warn_of_deprecated(settings)


def _context_of(fleet: Fleet) -> Callable[[], int]:
    """A function that returns the largest context of a ready decode worker or, while there is none,
    the last known value."""
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
