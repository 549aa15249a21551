"""The objects behind a router's API and its operators' routes, created and connected."""

from __future__ import annotations

import os
import random
import socket
import time
import uuid
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import msgspec
from fastapi import APIRouter
from prometheus_client import CollectorRegistry

from console.dashboard.dashboard import Dashboard, DashboardParts
from console.endpoints.fleet import admin_router, doctor_router, flight_router
from console.metrics import FleetCollector, VllmNames
from console.telemetry.caches.cache_report import CacheReport
from console.telemetry.examination.diagnosis import Diagnosis
from console.telemetry.examination.observer import FleetObserver
from console.telemetry.fleet_report import FleetReport
from console.telemetry.flight import FlightReport
from console.telemetry.otlp import OtlpExporter
from console.telemetry.request_log import RequestLog
from console.telemetry.targets import Targets
from gateway.text.tokenizer import Tokenizer
from http_kit.door import Door
from process.clock import wall_us
from process.flight_recorder import FlightRecorder
from process.metrics.metrics_server import process_registry
from process.sockets.encrypted_sockets import Network
from process.store.ignored_entries import IgnoredEntries
from process.store.load_channel import LoadChannel
from process.store.router_board import RouterBoard
from process.store.store_url import store_url
from protocol.flight import FlightKind
from protocol.messages import PROTOCOL_VERSION, Hello, Role
from protocol.registration import WorkerInfo
from router.fleet.fleet import Fleet
from router.fleet.history import FleetHistory
from router.fleet.link import LinkTimes, WorkerLink
from router.fleet.listener import LinkCallbacks
from router.metrics import FleetMetrics
from router.recording.recorder import Recorder
from router.recording.trace_file import TraceFile
from router.requests.dispatcher import Dispatcher
from router.requests.trace_store import TraceStore
from router.routing.caches.cache_index import CacheIndex
from router.routing.placement import Targets as Limits
from router.routing.sent_requests import decode, encode
from router_process.settings import RouterSettings


@dataclass(frozen=True)
class Parts:
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


def assemble(settings: RouterSettings, stack: AsyncExitStack) -> Parts:
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

    index, history = CacheIndex(settings.expected_cache_s), FleetHistory(wall_us)
    fleet = Fleet(connect, index, metrics, time.monotonic, history)
    stack.push_async_callback(fleet.close)
    traces = TraceStore(settings.trace_history, metrics, wall_us)
    cache = CacheReport(fleet, traces)
    dispatcher = Dispatcher(settings, fleet, traces, metrics, random.Random(), cache.placed)
    recorder = FlightRecorder(time.monotonic, wall_us)
    dispatcher.on_refused = lambda name, reason: recorder.note(
        FlightKind.REFUSED, (name, 0), text=reason
    )
    if settings.record_trace is not None:
        file = TraceFile(settings.record_trace, settings.record_trace_bytes)
        recording = Recorder(file, settings.cluster_secret, metrics.recorded.add)
        stack.callback(recording.close)
        dispatcher.on_end = recording.take
    fleet.listen(dispatcher)
    ignored = IgnoredEntries()
    registry.register(ignored)
    door = Door(time.perf_counter)
    targets = Targets.of(settings)
    dispatcher.use_targets(lambda: Limits(targets.ttft_target_ms, targets.tpot_target_ms))
    report = FleetReport(fleet, traces, targets, ignored, door)
    exporter = None
    if settings.otlp_endpoint is not None:
        ratio = settings.otlp_sample_ratio
        exporter = OtlpExporter(settings.otlp_endpoint, ratio, registry, name)
        traces.on_end(exporter.take)
    registry.register(FleetCollector(report))
    if settings.vllm_metric_names:
        registry.register(VllmNames(registry, fleet, next(iter(settings.served_model_name), None)))
    observer = FleetObserver(fleet, traces, report, cache, random.Random())
    requests = RequestLog(traces, report.peers)
    return Parts(
        name, registry, metrics, fleet, traces, dispatcher, report, requests, exporter,
        Diagnosis(observer, report), cache, recorder, ignored, door,
    )  # fmt: skip


def board_of(settings: RouterSettings, parts: Parts) -> RouterBoard:
    """The board on which routers tell each other of their load, and answer questions about what
    operators changed."""
    shown_name = f"{parts.name} ({socket.gethostname()}, pid {os.getpid()})"
    stagger = parts.fleet.view().stagger

    def take(summaries: dict[str, bytes]) -> None:
        parts.report.peers.take(summaries)
        stagger.rank = sum(each < board.router_id for each in summaries)

    board = RouterBoard(
        store_url(settings),
        settings.cluster,
        lambda: msgspec.json.encode(parts.report.summary(parts.log.shared_rows(), shown_name)),
        take,
        parts.log.answer,
        parts.ignored,
    )
    parts.log.ask = board.ask
    return board


def load_channel_of(settings: RouterSettings, parts: Parts) -> LoadChannel:
    """The channel on which routers tell each other what they have sent to workers."""
    view, peers = parts.fleet.view(), parts.report.peers

    def news() -> bytes | None:
        sent = view.newly_sent()
        return encode(sent) if sent else None

    channel = LoadChannel(
        store_url(settings),
        settings.cluster,
        news,
        lambda message: view.reserve_for_others(decode(message)),
        lambda: bool(peers.summaries),
        parts.ignored,
    )
    view.on_applied = channel.wake
    return channel


def dashboard_of(settings: RouterSettings, parts: Parts, tokenizer: Tokenizer) -> Dashboard:
    """The page that operators open, and its endpoints."""
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


def operators_of(parts: Parts) -> list[APIRouter]:
    """The endpoints that operators read without the page."""
    return [
        admin_router(parts.report, parts.log),
        doctor_router(parts.diagnosis, parts.cache),
        flight_router(FlightReport(parts.fleet, parts.traces, parts.recorder)),
    ]
