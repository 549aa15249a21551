"""The process of a host whose ranks belong to a worker with its head elsewhere."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path

from engine.checkpoint.config import load_model_config
from engine.checkpoint.shard import Shard
from engine.cpu_quota import threads_within_quota
from engine.engine_config import EngineConfig
from engine.parallel.sums import RankLost
from process.cores import cores_in, usable_cores
from process.lifecycle import StopSignal
from process.sockets.encrypted_sockets import Network
from process.wakeup import Wakeup
from protocol.messages import Role
from worker.probes import WorkerProbes, serve_probes
from worker.ranks.head import LOADING_S
from worker.ranks.host_ranks import HostRanks, kernels_of_ranks
from worker.ranks.node import Node
from worker.ranks.node_link import NodeLink
from worker.ranks.processes import HandProcesses
from worker.settings import WorkerSettings
from worker.startup.model_loading import engine_config, hand_settings, silence_s
from worker.startup.nodes import head_endpoint, own_address, ranks_of, terms_of
from worker.startup.start_phases import PhaseTimes, StartPhases
from worker.startup.transfers import end_opener

log = logging.getLogger(__name__)


def run_node(
    settings: WorkerSettings, role: Role, folder: Path, times: PhaseTimes, stack: ExitStack
) -> None:
    """Run the ranks of this host until their worker ends. Raises RankLost or HeadLost if it fails,
    ConfigError, ModelLoadError and Stopped."""
    wakeup = Wakeup()
    stack.callback(wakeup.close)
    stop = StopSignal(wakeup.wake, settings.parent_pid)
    stack.callback(stop.close)
    phases = StartPhases(stop, times)
    probes = WorkerProbes(phases, settings.peer_silence_s)
    serve_probes(settings, probes, stack)
    opener = end_opener(settings)
    with stop.raised():
        phases.enter("kernels")
        config = engine_config(settings, folder)
        kernels_of_ranks(config.kernels_dir)  # builds them, while the head does not count on us
        phases.enter("nodes")
        link = _joined(settings, role, config, stack)
        node = _started(settings, role, config, link, wakeup, stop)
        stack.callback(node.close)
        phases.enter("weights")
    probes.watch(node, node)
    reason = node.run(opener)
    if reason:
        raise RankLost(reason)
    log.info("stopped with the worker")


def _joined(
    settings: WorkerSettings, role: Role, config: EngineConfig, stack: ExitStack
) -> NodeLink:
    """The link to the head that has accepted us."""
    assert settings.node_rank
    network = Network(settings.cluster_secret)
    stack.callback(network.close)
    name = f"{settings.master_addr}:{settings.master_port}"
    link = NodeLink(network, head_endpoint(settings), name, settings.peer_silence_s)
    terms = terms_of(settings, config, config.folder, role)
    link.join(settings.node_rank, own_address(settings), terms, settings.join_s)
    log.info("joined the worker of the head at %s", name)
    return link


def _started(
    settings: WorkerSettings,
    role: Role,
    config: EngineConfig,
    link: NodeLink,
    wakeup: Wakeup,
    stop: StopSignal,
) -> Node:
    """The node, whose hands begin to load."""
    numbers = ranks_of(settings, settings.node_rank or 0)
    first = Shard.numbered(numbers.start, settings.tensor_parallel, settings.pipeline_parallel)
    load_model_config(config.folder).part_of(first)  # fails in one line, not once per rank
    threads = (
        settings.torch_threads
        or len(cores_in(settings.cores))
        or threads_within_quota(len(usable_cores()))
    )
    hands = hand_settings(settings, config, threads, role)
    shared = HostRanks(hands, silence_s(settings))
    processes = HandProcesses(hands, shared, numbers, silence_s(settings), LOADING_S)
    return Node(link, processes, shared, settings.peer_silence_s, stop, wakeup)
