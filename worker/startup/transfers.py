"""How a worker's transfers begin: the transport that its settings choose, and its pool's memory.

Knows nothing of peers and handoffs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from engine.device import bind_thread, pick_device
from engine.loader import LoadedEngine
from kv_transfer.authentication import authenticate_descriptor
from kv_transfer.service import TransferService
from kv_transfer.transports.distant_end import DistantHost, open_ends
from kv_transfer.transports.interface import Transport
from kv_transfer.transports.registry import chosen_transport, create_transport, open_end
from kv_transfer.transports.ucx_network import UNSIGNALLED, ucx_network, without_empty
from process.clock import wall_us
from process.sockets.host_names import is_loopback
from process.wakeup import Wakeup
from protocol.handoff_messages import PeerDescriptor
from worker.ranks.pool_memory import pool_memory
from worker.settings import WorkerSettings


def start_transfers(
    settings: WorkerSettings, wakeup: Wakeup, hosts: Sequence[DistantHost], stack: ExitStack
) -> TransferService:
    """The worker's transfers, which end with `stack`. Before `register_pool`, `hosts` gets the
    hosts and hands that have parts of the pool, which this process does not reach."""
    device = pick_device(settings.device)
    transport = _transport_name(settings, str(device))
    _prepare_environment(settings, transport)

    def open_transport() -> Transport:
        bind_thread(device)
        return create_transport(transport, str(device), partial(open_ends, hosts))

    transfers = TransferService(open_transport, wakeup.wake, wall_us=wall_us)
    stack.callback(transfers.close)
    transfers.start()
    return transfers


def end_opener(settings: WorkerSettings) -> Callable[[], Transport]:
    """What opens ends of KV transfers on a host that is not the head's. Raises ConfigError."""
    device = str(pick_device(settings.device))
    transport = _transport_name(settings, device)
    _prepare_environment(settings, transport)
    return partial(open_end, transport, device)


def register_pool(
    settings: WorkerSettings, loaded: LoadedEngine, transfers: TransferService
) -> PeerDescriptor:
    """Let transfers use the pool. Returns the descriptor with which peers reach it."""
    pool = loaded.pool
    layout = None if pool.layout.is_unsharded else pool.layout
    memory = pool_memory(pool)
    num_blocks = memory.num_blocks
    descriptor = transfers.register(memory)
    secret, agent = settings.cluster_secret.encode(), transfers.agent
    return PeerDescriptor(
        transport=transfers.transport_name,
        agent=agent,
        descriptor=descriptor,
        digest=authenticate_descriptor(secret, agent, descriptor, num_blocks, layout),
        num_blocks=num_blocks,
        layout=layout,
        wants_digests=settings.kv_checksum,
    )


def _transport_name(settings: WorkerSettings, device: str) -> str:
    """The transport to use. Workers that can reach a loopback address share its host and network
    namespace, and with them shared memory."""
    is_one_host = (
        is_loopback(settings.host) and not settings.kv_interface and settings.num_nodes == 1
    )
    return chosen_transport(settings.transport, device, is_one_host)


def _prepare_environment(settings: WorkerSettings, transport: str) -> None:
    """Set the variables that UCX reads when it is loaded, and when NIXL starts."""
    without_empty(os.environ)
    for name, value in UNSIGNALLED.items():
        os.environ.setdefault(name, value)
    if transport == "nixl":
        os.environ.update(_ucx_environment(settings))


def _ucx_environment(settings: WorkerSettings) -> dict[str, str]:
    """The variables that UCX must read before NIXL starts."""
    outer_host = None if is_loopback(settings.host) else settings.host
    interfaces, allows_tcp = settings.kv_interface, settings.allow_kv_over_tcp
    return ucx_network(outer_host, interfaces, allows_tcp, os.environ, settings.kv_ports)
