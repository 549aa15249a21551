"""How the hosts of one worker find each other and agree; see `worker.ranks.other_nodes`."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Protocol, TypeVar

from engine.checkpoint.files import model_fingerprint
from engine.device import pick_device
from engine.engine_config import EngineConfig
from engine.parallel.sums import RankLost
from process.lifecycle import StopSignal
from process.sockets.encrypted_sockets import Network
from process.sockets.host_names import is_address, is_loopback, is_wildcard, unbracketed
from process.sockets.options import tcp_endpoint
from process.sockets.outer_address import outer_address
from process.version import baton_version
from protocol.errors import ConfigError
from protocol.messages import PROTOCOL_VERSION, Role
from worker.ranks.other_nodes import OtherNodes
from worker.settings import WorkerSettings

log = logging.getLogger(__name__)

S = TypeVar("S", bound=WorkerSettings)


class Host(Protocol):
    """The settings that place one host of a worker and its ranks."""

    @property
    def num_nodes(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def tensor_parallel(self) -> int: ...
    @property
    def is_head(self) -> bool: ...
    @property
    def master_addr(self) -> str | None: ...
    @property
    def host(self) -> str: ...
    @property
    def advertise_address(self) -> str | None: ...


_LWS = {
    "nnodes": "LWS_GROUP_SIZE",
    "node_rank": "LWS_WORKER_INDEX",
    "master_addr": "LWS_LEADER_ADDRESS",
}
"""What a LeaderWorkerSet of Kubernetes tells its pods."""
_LOOK_UP_S = 1.0
_OWN = ("folder", "kernels_dir", "num_blocks", "memory_fraction", "open_tensors", "grammars")
"""Fields of the engine's configuration that each host has for itself, or only the head needs."""


def placed(settings: S, environ: Mapping[str, str]) -> S:
    """The settings, completed from a LeaderWorkerSet's environment. Raises ConfigError if hosts and
    ranks do not fit together."""
    found = {
        name: environ[variable]
        for name, variable in _LWS.items()
        if getattr(settings, name) is None and environ.get(variable)
    }
    for name in ("nnodes", "node_rank"):
        if not (found.get(name, "0").isascii() and found.get(name, "0").isdecimal()):
            raise ConfigError(f"{_LWS[name]} is {found[name]}, which is no number")
    done = replace(
        settings,
        nnodes=int(found.get("nnodes", settings.num_nodes)),
        node_rank=int(found.get("node_rank", settings.node_rank or 0)),
        master_addr=found.get("master_addr", settings.master_addr),
    )
    _check(done)
    return done


def _check(settings: WorkerSettings) -> None:
    nodes, number = settings.num_nodes, settings.node_rank
    if number is not None and number >= nodes:
        raise ConfigError(
            f"node_rank {number}: {nodes} hosts (nnodes) have the numbers 0 to {nodes - 1}"
        )
    if nodes == 1:
        return
    require_fit(settings)
    if settings.transport == "shm":
        raise ConfigError(f"nnodes {nodes}: transport shm stays on one host; leave it out")
    if settings.kv_checksum:
        raise ConfigError(f"nnodes {nodes}: no host has whole KV blocks; leave kv_checksum out")
    if settings.host_tier_bytes:
        raise ConfigError(
            f"nnodes {nodes}: no host has whole KV blocks for tiers; leave host_tier_bytes, "
            "disk_tier_bytes and disk_tier_dir out"
        )
    device = pick_device(settings.device)
    if device.type != "cpu":
        raise ConfigError(f"nnodes {nodes}: on cpu, not {device}")


def require_fit(settings: Host) -> None:
    """Raises ConfigError unless the ranks can lie on these hosts, and the head's host is known."""
    nodes, tp_size = settings.num_nodes, settings.tensor_parallel
    if settings.num_ranks % nodes:
        raise ConfigError(
            f"nnodes {nodes} must divide the {settings.num_ranks} ranks (tensor_parallel times "
            "pipeline_parallel)"
        )
    num_local = settings.num_ranks // nodes
    if num_local % tp_size and tp_size % num_local:
        raise ConfigError(
            f"nnodes {nodes}: {num_local} ranks on each host are neither whole stages of "
            f"tensor_parallel {tp_size} nor a whole part of one"
        )
    if settings.master_addr is None:
        raise ConfigError(f"nnodes {nodes} needs master_addr, the address of the host of node 0")
    if is_wildcard(settings.master_addr):
        raise ConfigError(f"master_addr {settings.master_addr} is no address of a host")


def terms_of(
    settings: WorkerSettings, config: EngineConfig, folder: Path, role: Role
) -> dict[str, str]:
    """The values that have to be equal on all hosts of a worker, by name."""
    terms = {
        "the version of Baton": f"{baton_version()} (protocol {PROTOCOL_VERSION})",
        "the role": role.value,
        "nnodes": str(settings.num_nodes),
        "tensor_parallel": str(settings.tensor_parallel),
        "pipeline_parallel": str(settings.pipeline_parallel),
    }
    for each in fields(config):
        value = getattr(config, each.name)
        if each.name == "scheduler":
            terms |= {part.name: str(getattr(value, part.name)) for part in fields(value)}
        elif each.name not in _OWN:
            terms[each.name] = str(value)
    return terms | {"the model's fingerprint": model_fingerprint(folder)}


def ranks_of(settings: Host, node: int) -> range:
    """The numbers of the ranks on a host."""
    num_local = settings.num_ranks // settings.num_nodes
    return range(node * num_local, (node + 1) * num_local)


def own_address(settings: Host) -> str:
    """The address of this host to which ranks of other hosts connect. Raises ConfigError."""
    assert settings.master_addr is not None
    if is_loopback(settings.master_addr) or (settings.is_head and is_address(settings.master_addr)):
        return _resolved(settings.master_addr, 0.0)
    for own in (settings.host, settings.advertise_address):
        if own is not None and is_address(own) and not (is_wildcard(own) or is_loopback(own)):
            return own
    return outer_address(settings.master_addr, is_ipv4_only=":" not in settings.host)


def head_endpoint(settings: WorkerSettings) -> str:
    """The head's endpoint for its nodes. A node waits until the head's name resolves. Raises
    ConfigError."""
    assert settings.master_addr is not None
    if settings.is_head:
        return tcp_endpoint(own_address(settings), settings.master_port)
    return tcp_endpoint(_resolved(settings.master_addr, settings.join_s), settings.master_port)


def open_nodes(
    settings: WorkerSettings, terms: Mapping[str, str], stop: StopSignal, stack: ExitStack
) -> OtherNodes:
    """The other nodes of the head's worker, all of which have joined; `stack` ends them. Raises
    ConfigError, RankLost and Stopped."""
    network = Network(settings.cluster_secret)
    stack.callback(network.close)
    ranks = [ranks_of(settings, node) for node in range(1, settings.num_nodes)]
    nodes = OtherNodes(
        network, head_endpoint(settings), ranks, terms, settings.peer_silence_s, stop.insist
    )
    stack.push(_closes(nodes))
    log.info("waiting for %d other hosts of this worker at %s", len(ranks), nodes.endpoint)
    missing = nodes.wait_for_all(settings.join_s)
    if missing:
        raise ConfigError(
            f"node {missing[0]} of {settings.num_nodes} has not joined within {settings.join_s:g} "
            f"s: start it with node_rank {missing[0]}, master_addr {settings.master_addr} and "
            f"master_port {settings.master_port}"
        )
    return nodes


def _closes(nodes: OtherNodes) -> Callable[..., None]:
    def close(kind: object, error: BaseException | None, trace: object) -> None:
        nodes.close("" if error is None else f"the head has ended: {error}")

    return close


def lost_node(nodes: OtherNodes | None, error: RankLost) -> RankLost:
    """The error with the reason that a node has given."""
    return RankLost(nodes.reason) if nodes is not None and nodes.reason else error


def _resolved(name: str, limit_s: float) -> str:
    """The first address of a host name, which name servers may know only after a while. Raises
    ConfigError."""
    end = time.monotonic() + limit_s
    while True:
        try:
            found = socket.getaddrinfo(unbracketed(name), None, type=socket.SOCK_STREAM)
            return str(found[0][4][0])
        except OSError as error:
            if time.monotonic() >= end:
                raise ConfigError(f"master_addr {name} is not known here: {error}") from error
        time.sleep(_LOOK_UP_S)
