"""A worker process from its settings to its exit status: assemble, register, run, leave.

Resources are closed in the reverse order of opening, whatever happens in between. A worker that is
told to stop announces this to the fleet before it finishes its remaining requests, and leaves the
fleet before its sockets close.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.checkpoint.weights import Progress
from engine.device import bind_thread
from engine.gpu.share import limit_to_share
from engine.loader import EngineConfig, LoadedEngine, load_engine, pick_device
from kv_transfer.authentication import authenticate_descriptor
from kv_transfer.service import TransferService
from kv_transfer.transports.interface import PoolMemory, Transport
from kv_transfer.transports.registry import create_transport
from process.cores import cores_in, keep_to_cores
from process.garbage_collector import spare_the_collector
from process.lifecycle import StopSignal
from process.logs import setup_logs
from process.metrics import process_registry, start_metrics_server
from process.model_source import model_name, resolve_model
from process.process_watch import machine_name
from process.sockets.control import ControlServer, HelloPolicy
from process.sockets.events import EventPublisher
from process.sockets.network import Network
from process.sockets.options import tcp_endpoint
from process.store.membership import WorkerLease
from process.wakeup import Wakeup
from protocol.errors import ConfigError, ModelLoadError
from protocol.messages import PROTOCOL_VERSION, Hello, PeerDescriptor, Role
from protocol.registration import WorkerInfo, WorkerState
from scheduling.scheduler import SchedulerConfig
from worker.host import WorkerHost, WorkerParts
from worker.intake import Intake
from worker.metrics import WorkerMetrics
from worker.reporter import Reporter
from worker.settings import WorkerSettings, choose_worker_id

log = logging.getLogger(__name__)

_LINGER_MS = 1000


class RoleLoop(Protocol):
    """The part of a worker process that its role adds."""

    def run(self) -> None:
        """Serve until `WorkerHost.is_finished`."""


@dataclass(frozen=True)
class Surroundings:
    """The objects besides the host that a role may need to build its loop."""

    network: Network
    hello: Hello
    descriptor: PeerDescriptor
    is_alive: Callable[[str, str], bool]
    find: Callable[[str, str], WorkerInfo | None]
    members: Callable[[], Collection[WorkerInfo]]
    machine: str
    stack: ExitStack


def run_worker(
    settings: WorkerSettings,
    role: Role,
    build: Callable[[WorkerHost, Surroundings], RoleLoop],
) -> int:
    """Run one worker until it is told to stop; returns its exit status.

    A wrong setting or checkpoint gives one line on stderr and status 2.
    """
    setup_logs(settings.log_level, settings.log_format, role.value)
    try:
        if settings.cores:  # before threads start, so that they are pinned, too
            keep_to_cores(cores_in(settings.cores))
        _share_card(settings)
        with ExitStack() as stack:
            _serve(settings, role, build, stack)
    except (ConfigError, ModelLoadError) as error:
        print(f"baton {role.value}: {error}", file=sys.stderr)
        return 2
    return 0


def _share_card(settings: WorkerSettings) -> None:
    """Limit this process to a part of the card if `sm_fraction` is set, before CUDA starts. Raises
    ConfigError if that is impossible."""
    if settings.sm_fraction is None:
        return
    if settings.device != "cpu":
        limit_to_share(settings.sm_fraction, os.environ)
    device = pick_device(settings.device)
    if device.type != "cuda":
        raise ConfigError(f"sm_fraction is a part of a CUDA card, and the device is {device}")


@dataclass(frozen=True)
class _Local:
    """The parts of a worker before it connects to the fleet."""

    wakeup: Wakeup
    stop: StopSignal
    transfers: TransferService
    loaded: LoadedEngine
    descriptor: PeerDescriptor


@dataclass(frozen=True)
class _Member:
    """A reachable worker and its place in the fleet."""

    host: WorkerHost
    around: Surroundings
    lease: WorkerLease
    info: WorkerInfo


def _serve(
    settings: WorkerSettings,
    role: Role,
    build: Callable[[WorkerHost, Surroundings], RoleLoop],
    stack: ExitStack,
) -> None:
    local = _prepare(settings, stack)
    member = _connect(settings, role, local, stack)
    loop = build(member.host, member.around)
    local.transfers.hold(member.lease.holds_until)
    stack.callback(member.lease.close)
    member.host.join(member.lease)
    member.lease.start()
    spare_the_collector()
    info = member.info
    log.info(
        "%s ready: %s, %d KV blocks of %d tokens, transport %s, device %s",
        info.worker_id,
        info.model,
        info.num_blocks,
        info.block_size,
        info.transport + (f" ({', '.join(info.transport_paths)})" if info.transport_paths else ""),
        local.loaded.pool.device,
    )
    loop.run()
    if member.lease.is_replaced:
        raise ConfigError(f"another process registered as {info.worker_id}; give each its own id")
    log.info("%s stopped", info.worker_id)


def _prepare(settings: WorkerSettings, stack: ExitStack) -> _Local:
    """Signals, the transfer thread, and the engine with its registered pool."""
    wakeup = Wakeup()
    stack.callback(wakeup.close)
    stop = StopSignal(wakeup.wake, settings.parent_pid)
    stack.callback(stop.close)
    transfers = _start_transfers(settings, wakeup, stack)
    loaded = _load(settings, transfers)
    loaded.grammars.wake = wakeup.wake
    stack.callback(loaded.grammars.close)
    descriptor = _register_pool(settings, loaded, transfers)
    return _Local(wakeup, stop, transfers, loaded, descriptor)


def _connect(settings: WorkerSettings, role: Role, local: _Local, stack: ExitStack) -> _Member:
    """The sockets and a registration that is not announced yet."""
    worker_id = choose_worker_id(role.value, settings.worker_id)
    engine, layout = local.loaded.engine, local.loaded.engine.layout
    network = Network(settings.cluster_secret)
    stack.callback(network.close, linger_ms=_LINGER_MS)
    policy = HelloPolicy(
        worker_id,
        uuid.uuid4().hex,
        layout.model_fingerprint,
        layout.fingerprint,
        machine=machine_name(),
        pid=os.getpid(),
    )
    control = tcp_endpoint(settings.host, settings.control_port)
    server = ControlServer(network, control, policy, settings.peer_silence_s)
    publisher = EventPublisher(network, tcp_endpoint(settings.host, settings.events_port))
    interval_s, idle_s = settings.stats_interval_ms / 1e3, settings.stats_idle_ms / 1e3
    reporter = Reporter(engine, publisher, worker_id, policy.incarnation, interval_s, idle_s)
    _serve_metrics(settings, role, worker_id, reporter, stack)
    endpoints = (server.endpoint, publisher.endpoint)
    info = _info(settings, role, policy, local, endpoints)
    lease = WorkerLease(settings.redis_url, settings.cluster, info, settings.lease_s)
    parts = WorkerParts(
        engine=engine,
        pool=local.loaded.pool,
        transfers=local.transfers,
        server=server,
        reporter=reporter,
        intake=Intake(
            engine.limits,
            layout,
            local.loaded.grammars,
            settings.hash_seed,
            settings.request_deadline_s,
        ),
        wakeup=local.wakeup,
        stop=local.stop,
        announce=lease.update,
    )
    around = Surroundings(
        network=network,
        hello=_hello(role, policy),
        descriptor=local.descriptor,
        is_alive=lease.is_alive,
        find=lease.find,
        members=lease.members,
        machine=info.machine,
        stack=stack,
    )
    return _Member(WorkerHost(settings, worker_id, parts), around, lease, info)


def _hello(role: Role, policy: HelloPolicy) -> Hello:
    return Hello(
        sender=policy.worker_id,
        role=role,
        protocol_version=PROTOCOL_VERSION,
        model_fingerprint=policy.model_fingerprint,
        layout_fingerprint=policy.layout_fingerprint,
    )


def _serve_metrics(
    settings: WorkerSettings, role: Role, worker_id: str, reporter: Reporter, stack: ExitStack
) -> None:
    if settings.metrics_port is None:
        return
    registry = process_registry()
    registry.register(WorkerMetrics(role, worker_id, reporter.latest))
    server = start_metrics_server(settings.metrics_port, settings.host, registry)
    stack.callback(server.close)
    log.info("metrics on http://%s:%d/metrics", settings.host, server.port)


def _start_transfers(settings: WorkerSettings, wakeup: Wakeup, stack: ExitStack) -> TransferService:
    device = pick_device(settings.device)

    def open_transport() -> Transport:
        bind_thread(device)
        return create_transport(settings.transport, str(device))

    transfers = TransferService(open_transport, wakeup.wake)
    transfers.start()
    stack.callback(transfers.close)
    return transfers


def _load(settings: WorkerSettings, transfers: TransferService) -> LoadedEngine:
    threads = settings.torch_threads or len(cores_in(settings.cores))
    if threads:
        torch.set_num_threads(threads)
    folder = resolve_model(settings.model)
    config = EngineConfig(
        folder=folder,
        scheduler=SchedulerConfig(
            block_size=settings.block_size,
            max_batch_size=settings.max_batch_size,
            chunk_min_tokens=max(settings.chunk_min_tokens, settings.block_size),
            chunk_max_tokens=max(settings.chunk_max_tokens, settings.block_size),
            itl_target_s=settings.itl_target_ms / 1e3,
        ),
        dtype=settings.dtype,
        device=settings.device,
        num_blocks=settings.num_blocks,
        memory_fraction=settings.memory_fraction,
        max_context=settings.max_context,
        attention=settings.attention,
        weights=settings.weights,
        kv_dtype=settings.kv_dtype,
        kv_order=settings.kv_order,
        cuda_graphs=settings.cuda_graphs,
    )
    started = time.monotonic()
    loaded = load_engine(config, time.monotonic, transfers.allocate, _log_progress(folder.name))
    log.info("loaded %s in %.1f s, warming up", folder.name, time.monotonic() - started)
    layout = loaded.engine.layout
    log.info(
        "KV blocks of %d tokens, %s, in the order of %s: layout fingerprint %s",
        layout.block_size,
        layout.dtype,
        layout.order,
        layout.fingerprint,
    )
    loaded.engine.warm_up()
    return loaded


def _log_progress(name: str) -> Progress:
    """Logs the progress of loading once a second, and at the end."""
    said_at = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal said_at
        now = time.monotonic()
        if done == total or now - said_at >= 1.0:
            said_at = now
            percent, size = 100 * done // max(total, 1), total / 1e6
            log.info("loading weights of %s: %d %% of %.0f MB", name, percent, size)

    return progress


def _register_pool(
    settings: WorkerSettings, loaded: LoadedEngine, transfers: TransferService
) -> PeerDescriptor:
    pool = loaded.pool
    memory = PoolMemory(pool.base_address, pool.block_bytes, pool.num_blocks, str(pool.device))
    descriptor = transfers.register(memory)
    secret = settings.cluster_secret.encode()
    return PeerDescriptor(
        transport=transfers.transport_name,
        agent=transfers.agent,
        descriptor=descriptor,
        digest=authenticate_descriptor(secret, transfers.agent, descriptor, pool.num_blocks),
        num_blocks=pool.num_blocks,
    )


def _info(
    settings: WorkerSettings,
    role: Role,
    policy: HelloPolicy,
    local: _Local,
    endpoints: tuple[str, str],
) -> WorkerInfo:
    control, events = endpoints
    loaded = local.loaded
    return WorkerInfo(
        worker_id=policy.worker_id,
        incarnation=policy.incarnation,
        role=role,
        state=WorkerState.READY,
        host=socket.gethostname(),
        pid=os.getpid(),
        control=control,
        events=events,
        protocol_version=PROTOCOL_VERSION,
        model=settings.served_model_name or model_name(settings.model),
        model_fingerprint=policy.model_fingerprint,
        layout_fingerprint=policy.layout_fingerprint,
        transport=local.transfers.transport_name,
        block_size=loaded.engine.layout.block_size,
        num_blocks=loaded.pool.num_blocks,
        max_context=loaded.engine.limits.max_context,
        machine=machine_name(),
        transport_paths=local.transfers.paths,
    )
