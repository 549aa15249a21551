"""Runs the checks of one host, then connects to the other processes of the run: as ranks of one
worker, if it has several hosts, and to move blocks."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence

from cli.pods.preflight.blocks import BlockMover
from cli.pods.preflight.findings import (
    MIB,
    Finding,
    check_card,
    check_clock,
    check_interfaces,
    check_locked_memory,
    check_open_files,
    check_shared_memory,
    check_store,
)
from cli.pods.preflight.meeting import Meeting
from cli.pods.preflight.rank_ways import check_ranks
from cli.pods.preflight.settings import PreflightSettings
from kv_transfer.transports.registry import chosen_transport, create_transport
from kv_transfer.transports.ucx_network import UNSIGNALLED, ucx_network, without_empty
from process.settings import settings_or_exit
from process.sockets.host_names import is_loopback
from process.store.store_url import store_url
from protocol.errors import BatonError, ServiceError

_TRANSFER_S = 120.0


def main(argv: Sequence[str]) -> int:
    """Print the findings; returns 1 if something is missing."""
    settings = settings_or_exit(
        PreflightSettings,
        argv,
        prog="baton preflight",
        description="Check this host, and move blocks to and from the other hosts of the run.",
    )
    findings = check_host(settings)
    for each in findings:
        print(each, flush=True)
    if all(each.is_ok is not False for each in findings):
        for check in (check_ranks, check_blocks):
            for each in check(settings):
                print(each, flush=True)
                findings.append(each)
    failed = [each.name for each in findings if each.is_ok is False]
    if failed:
        print(f"baton preflight: {', '.join(failed)}: see above", file=sys.stderr)
    return 1 if failed else 0


def check_host(settings: PreflightSettings) -> list[Finding]:
    """The findings about this host."""
    moved = settings.preflight_mib * MIB * (1 + settings.preflight_processes)
    return [
        check_store(store_url(settings)),
        check_clock(store_url(settings)),
        check_card(settings.device),
        check_interfaces(settings.kv_interface),
        check_locked_memory(settings.kv_interface, moved),
        check_shared_memory(),
        check_open_files(),
    ]


def check_blocks(settings: PreflightSettings) -> list[Finding]:
    """The findings about blocks to and from each other process of the run."""
    deadline = time.monotonic() + settings.wait_s
    peers = [
        each for each in range(settings.preflight_processes) if each != settings.preflight_index
    ]
    try:
        return _exchange(settings, peers, deadline)
    except BatonError as error:
        return [Finding("blocks", False, str(error))]


def _exchange(settings: PreflightSettings, peers: list[int], deadline: float) -> list[Finding]:
    name = chosen_transport(settings.transport, "cpu", is_one_host=False)
    if name == "nixl":
        _prepare_ucx(settings)
    index = settings.preflight_index
    transport = create_transport(name, "cpu")
    url, cluster, run = store_url(settings), settings.cluster, settings.preflight_run
    findings = []
    with (
        BlockMover(transport, settings.preflight_mib, settings.preflight_processes) as mover,
        Meeting(url, cluster, run, settings.cluster_secret) as meeting,
    ):
        host = socket.gethostname()
        meeting.enter(index, host, transport.agent, transport.descriptor(), mover.num_blocks)
        paths = ", ".join(transport.paths) or transport.name
        for peer in peers:
            entry = meeting.wait_for(peer, deadline, mover.turn)
            mover.connect(entry.agent, entry.descriptor, entry.num_blocks, _TRANSFER_S)
            speed = mover.write(index, peer, entry.agent, _TRANSFER_S)
            text = f"{settings.preflight_mib} MiB at {speed:.2f} GiB/s; UCX may use {paths}"
            findings.append(Finding(f"blocks to {entry.host}", True, text))
        meeting.leave(index)
        for peer in peers:
            if not meeting.wait_for_leave(peer, deadline, mover.turn):
                raise ServiceError(f"process {peer} has not finished")
        if damaged := mover.damaged(peers):
            names = ", ".join(str(each) for each in damaged)
            raise ServiceError(f"blocks of process {names} did not arrive whole")
    return findings


def _prepare_ucx(settings: PreflightSettings) -> None:
    """Set UCX's variables as a worker with these settings would. Raises ConfigError."""
    without_empty(os.environ)
    os.environ.update({name: os.environ.get(name, value) for name, value in UNSIGNALLED.items()})
    outer_host = None if is_loopback(settings.host) else settings.host
    interfaces, allows_tcp = settings.kv_interface, settings.allow_kv_over_tcp
    os.environ.update(
        ucx_network(outer_host, interfaces, allows_tcp, os.environ, settings.kv_ports)
    )
