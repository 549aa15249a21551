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
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from checkpoint.model_source import commit_of
from checkpoint.texts_fingerprint import texts_fingerprint
from checkpoint.trial import start_trial
from engine.device import pick_device
from engine.gpu.multiprocessor_share import limit_to_share
from engine.loader import LoadedEngine
from engine.parallel.sums import RankLost
from kv_transfer.service import TransferService
from kv_transfer.tiers.kv_tiers import KvTiers
from kv_transfer.transports.distant_end import DistantHost
from kv_transfer.transports.ucx_paths import machine_paths, usable_paths
from process.allocator import spare_the_collector
from process.clock import Clock
from process.cores import cores_in, keep_to_cores
from process.lifecycle import Stopped, StopSignal
from process.logs import setup_logs
from process.open_files import MOST_FILES, allow_open_files
from process.process_watch import machine_name
from process.settings import warn_of_unknown_variables
from process.sockets.control import ControlServer
from process.sockets.encrypted_sockets import Network
from process.sockets.events import EventPublisher
from process.sockets.hello import HelloPolicy
from process.sockets.options import tcp_endpoint
from process.store.store_url import store_url
from process.store.worker_lease import WorkerLease
from process.wakeup import Wakeup
from protocol.error_line import one_line
from protocol.errors import ConfigError, ModelLoadError
from protocol.handoff_messages import PeerDescriptor
from protocol.hashing import seed_of
from protocol.messages import PROTOCOL_VERSION, Role
from protocol.registration import WorkerInfo, WorkerState
from worker.admitting_routers import Admissions
from worker.counters import Count
from worker.host import Surroundings, WorkerHost, WorkerParts
from worker.intake import Intake
from worker.link_counters import LinkCounters, LinkWatch
from worker.loop import WorkerLoop, WorkerRole
from worker.metrics import WorkerMetrics
from worker.moved_blocks import bytes_by_group, kept_windows
from worker.probes import WorkerProbes, serve_probes
from worker.ranks.node_link import HeadLost
from worker.reporter import Reporter
from worker.settings import WorkerSettings, choose_worker_id
from worker.startup.addresses import advertised, advertised_address, checked
from worker.startup.model_loading import ModelLoading, fetched, served_name, transfer_means
from worker.startup.node_process import run_node
from worker.startup.nodes import placed
from worker.startup.start_phases import PhaseTimes, StartPhases, since_process_began
from worker.startup.transfers import register_pool, start_transfers
from worker.tasks import AnyTask
from worker.tiers.assembly import open_tiers
from worker.weights.choice import FINGERPRINT_DIGITS, can_send
from worker.weights.server import ServedModel, WeightsServer

log = logging.getLogger(__name__)

_LINGER_MS = 1000


RoleBuilder = Callable[[WorkerHost, Surroundings], WorkerRole[AnyTask]]


def run_worker(
    settings: WorkerSettings,
    role: Role,
    build: RoleBuilder[AnyTask],
) -> int:
    """Run one worker until it is told to stop; returns its exit status.

    A wrong setting or checkpoint, or an id that another worker holds, gives one line on stderr and
    status 2. A worker that is told to stop during its start ends at once and never registers.
    """
    times = since_process_began()
    setup_logs(settings.log_level, settings.log_format, settings.worker_id or role.value)
    warn_of_unknown_variables(type(settings))
    allow_open_files(MOST_FILES)
    try:
        if settings.cores:  # before threads start, so that they are pinned, too
            keep_to_cores(cores_in(settings.cores))
        _share_card(settings)
        settings = checked(placed(settings, os.environ))
        # nothing needs closing yet, so a signal may end a download at once
        times.enter("fetch")
        folder = fetched(settings)
        with ExitStack() as stack:
            start = _Start(settings, folder, role, times)
            if settings.is_head:
                _serve(start, build, stack)
            else:
                run_node(settings, role, folder, times, stack)
    except Stopped:
        log.info("stopped while it started")
    except (RankLost, HeadLost) as error:
        log.error("the worker ends: %s", error)
        return 1
    except (ConfigError, ModelLoadError) as error:
        print(f"baton {role.value}: {one_line(error)}", file=sys.stderr)
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
class _Start:
    """The settings of a worker's start, and the times of its phases."""

    settings: WorkerSettings
    folder: Path
    role: Role
    times: PhaseTimes


@dataclass(frozen=True)
class _Local:
    """The parts of a worker before it connects to the fleet."""

    wakeup: Wakeup
    stop: StopSignal
    transfers: TransferService
    loaded: LoadedEngine
    descriptor: PeerDescriptor
    paths: tuple[str, ...]  # the paths of KV blocks to peers
    folder: Path  # of the model's files
    texts: str  # the fingerprint of configuration and tokenizer
    tiers: KvTiers | None


@dataclass(frozen=True)
class _Member:
    """A reachable worker and its place in the fleet."""

    host: WorkerHost
    around: Surroundings
    lease: WorkerLease
    info: WorkerInfo


def _serve(
    start: _Start,
    build: RoleBuilder[AnyTask],
    stack: ExitStack,
) -> None:
    settings, role = start.settings, start.role
    wakeup = Wakeup()
    stack.callback(wakeup.close)
    stop = StopSignal(wakeup.wake, settings.parent_pid)
    stack.callback(stop.close)
    phases = StartPhases(stop, start.times)
    probes = WorkerProbes(phases, settings.peer_silence_s)
    registry = serve_probes(settings, probes, stack)
    with stop.raised():
        local = _prepare(start, wakeup, phases, stack)
        phases.enter("registration")
        member = _connect(settings, role, local, probes, stack)
        latest, tp_size = member.host.latest_stats, settings.tensor_parallel
        registry.register(WorkerMetrics(role, member.info.worker_id, latest, tp_size))
        registry.register(member.lease.ignored)
        loop = WorkerLoop(member.host, build(member.host, member.around))
        local.transfers.hold(member.lease.holds_until)
        stack.callback(member.lease.close)
        member.host.lifecycle.join(member.lease)
    member.lease.start(lambda: member.lease.note_start(phases.finish()))
    probes.add_check(member.host.admissions.missing)
    probes.watch(member.host.lifecycle, member.lease)
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
    if member.lease.refusal is not None:
        raise ConfigError(member.lease.refusal)
    log.info("%s stopped", info.worker_id)


def _prepare(start: _Start, wakeup: Wakeup, phases: StartPhases, stack: ExitStack) -> _Local:
    """Start the transfer thread, and the engine with its registered pool. Raises Stopped."""
    settings = start.settings
    # in parallel with the transport's start
    trial = start_trial("worker.startup.checkpoint_trial", start.folder)
    stack.callback(trial.cancel)
    phases.enter("transport")
    hosts: list[DistantHost] = []
    transfers = start_transfers(settings, wakeup, hosts, stack)
    trial.finish()
    loading = ModelLoading(settings, start.role, start.folder, transfers, phases)
    loaded, folder = loading.load(stack), loading.folder
    loaded.grammars.wake = wakeup.wake
    stack.callback(loaded.grammars.close)
    hosts += loading.other_hosts
    descriptor = register_pool(settings, loaded, transfers)
    paths = usable_paths(transfers.paths, loaded.pool.why_not_shareable())
    texts = texts_fingerprint(folder)
    tiers = open_tiers(settings, loaded, wakeup.wake, stack)
    return _Local(wakeup, phases.stop, transfers, loaded, descriptor, paths, folder, texts, tiers)


def _connect(
    settings: WorkerSettings, role: Role, local: _Local, probes: WorkerProbes, stack: ExitStack
) -> _Member:
    """Open the sockets and make a registration, which is not announced yet."""
    worker_id = choose_worker_id(role.value, settings.worker_id)
    engine, layout = local.loaded.engine, local.loaded.engine.layout
    network = Network(settings.cluster_secret)
    stack.callback(network.close, linger_ms=_LINGER_MS)
    policy = _hello_policy(settings, worker_id, local)
    control = tcp_endpoint(settings.host, settings.control_port)
    server = ControlServer(network, control, policy, settings.peer_silence_s)
    publisher = EventPublisher(network, tcp_endpoint(settings.host, settings.events_port))
    interval_s, idle_s = settings.stats_interval_ms / 1e3, settings.stats_idle_ms / 1e3
    reporter = Reporter(engine, publisher, worker_id, policy.incarnation, interval_s, idle_s)
    watch = LinkWatch(LinkCounters(), lambda: reporter.counters[Count.BLOCKS_SENT])
    stack.callback(watch.close)
    reporter.watch_links(watch.latest)
    reporter.watch_received(lambda: server.legs_received)
    address = advertised_address(settings)
    endpoints = (advertised(server.endpoint, address), advertised(publisher.endpoint, address))
    info = _info(settings, role, policy, local, endpoints)
    lease = WorkerLease(store_url(settings), settings.cluster, info, settings.lease_s)
    parts = _parts(settings, local, server, reporter, lease)
    around = Surroundings(
        network=network,
        hello=policy.hello(role),
        descriptor=local.descriptor,
        is_alive=lease.is_alive,
        find=lease.find,
        members=lease.members,
        look_again=lease.look_again,
        machine=machine_name(),
        stack=stack,
        add_check=probes.add_check,
    )
    host = WorkerHost(settings, worker_id, parts)
    if info.sends_weights:
        model = ServedModel(local.folder, layout.model_fingerprint[:FINGERPRINT_DIGITS])
        weights = WeightsServer(model, transfer_means(settings, local.transfers), local.wakeup.wake)
        stack.callback(weights.close)
        host.send_weights(weights)
    return _Member(host, around, lease, info)


def _machine(local: _Local) -> str:
    """The machine on which peers see our process end, and with it all that may write to them.
    Ends on other hosts, and in hands, may write for some time after that, so then peers get none
    and wait for our lease."""
    return machine_name() if local.loaded.pool.has_all_ranks else ""


def _hello_policy(settings: WorkerSettings, worker_id: str, local: _Local) -> HelloPolicy:
    layout = local.loaded.engine.layout
    return HelloPolicy(
        worker_id,
        uuid.uuid4().hex,
        layout.model_fingerprint,
        layout.unsharded.fingerprint,
        machine=_machine(local),
        pid=os.getpid(),
        weight_version=commit_of(local.folder) or "",
        revision=settings.deployment_revision,
        kv_groups=layout.description,
    )


def _parts(
    settings: WorkerSettings,
    local: _Local,
    server: ControlServer,
    reporter: Reporter,
    lease: WorkerLease,
) -> WorkerParts:
    engine = local.loaded.engine
    intake = Intake(
        engine.limits,
        engine.layout,
        local.loaded.grammars,
        seed_of(settings.cluster_secret),
        settings.request_deadline_s,
    )
    return WorkerParts(
        engine=engine,
        pool=local.loaded.pool,
        transfers=local.transfers,
        server=server,
        reporter=reporter,
        intake=intake,
        admissions=Admissions(lease.routers),
        wakeup=local.wakeup,
        stop=local.stop,
        clock=Clock(),
        announce=lease.update,
        tiers=local.tiers,
    )


def _info(
    settings: WorkerSettings,
    role: Role,
    policy: HelloPolicy,
    local: _Local,
    endpoints: tuple[str, str],
) -> WorkerInfo:
    control, events = endpoints
    loaded, scheduler = local.loaded, local.loaded.engine.scheduler.config
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
        model=served_name(settings),
        model_fingerprint=policy.model_fingerprint,
        layout_fingerprint=policy.layout_fingerprint,
        transport=local.transfers.transport_name,
        block_size=loaded.engine.layout.block_size,
        num_blocks=loaded.engine.scheduler.blocks.num_blocks,
        max_context=loaded.engine.limits.max_context,
        machine=_machine(local),
        texts_fingerprint=local.texts,
        transport_paths=local.paths,
        machine_paths=machine_paths(local.paths, str(loaded.pool.device)),
        chosen=settings.advised(),
        max_batch_size=scheduler.max_batch_size,
        chunk_max_tokens=scheduler.chunk_max_tokens,
        itl_target_ms=settings.itl_target_ms,
        drain_grace_s=settings.drain_grace_s,
        tensor_parallel=settings.tensor_parallel,
        pipeline_parallel=settings.pipeline_parallel,
        has_windows=any(each.window for each in loaded.engine.layout.groups),
        windows=kept_windows(loaded.engine.scheduler, loaded.engine.layout),
        block_bytes=bytes_by_group(loaded.engine.layout)[0],
        sends_weights=can_send(local.folder),
        weight_version=policy.weight_version,
        revision=policy.revision,
    )
