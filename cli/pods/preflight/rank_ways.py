"""Checks the ways between the ranks of one worker that lie on several hosts.

Each process of the run stands for a host of the worker. It listens once for each of its ranks, and
process 0 also at the head's port. Then it connects from its address to each rank on another host,
as gloo does, and from other hosts to the head, as nodes do. What listens answers with its host's
token, so an address that two hosts have is found. Opens no gloo group and knows no secret.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import NamedTuple

import msgspec
from msgspec import Struct

from cli.pods.preflight.findings import Finding
from cli.pods.preflight.meeting import Meeting
from cli.pods.preflight.settings import PreflightSettings
from process.sockets.host_names import bracketed
from process.store.store_url import store_url
from protocol.errors import BatonError, ConfigError, ServiceError

CONNECT_S = 5.0
_TOKEN_BYTES = 16
_PERIOD_S = 0.1
_NUM_THREADS = 32


class Listeners(Struct, frozen=True):
    """Where a host's ranks can be reached: the ports of its ranks in order, after them the head's
    port on the head's host."""

    address: str
    ports: list[int]
    token: bytes


class Way(NamedTuple):
    """What a rank has to connect to."""

    name: str
    address: str
    port: int
    token: bytes


def check_ranks(settings: PreflightSettings) -> list[Finding]:
    """One finding for each way from a rank of this host; none if the worker has one host."""
    if settings.num_nodes == 1:
        return []
    try:
        return _check(settings, time.monotonic() + settings.wait_s)
    except BatonError as error:
        return [Finding("ranks", False, str(error))]


def _check(settings: PreflightSettings, deadline: float) -> list[Finding]:
    from worker.startup.nodes import own_address, ranks_of, require_fit  # imports torch

    require_fit(settings)
    if settings.preflight_processes != settings.num_nodes:
        raise ConfigError(
            f"preflight_processes {settings.preflight_processes} must equal nnodes "
            f"{settings.num_nodes}: one process for each host of the worker"
        )
    number = settings.preflight_index
    address = own_address(settings)
    url, run = store_url(settings), f"{settings.preflight_run}:ranks"
    others = [each for each in range(settings.num_nodes) if each != number]
    with (
        Meeting(url, settings.cluster, run, settings.cluster_secret) as meeting,
        _Answers(address, len(ranks_of(settings, number)), settings) as answers,
    ):
        mine = msgspec.msgpack.encode(answers.listeners)
        meeting.enter(number, socket.gethostname(), address, mine, 0)
        ways = []
        for other in others:
            found, ranks = meeting.wait_for(other, deadline, _no_turn), ranks_of(settings, other)
            try:
                there = msgspec.msgpack.decode(found.descriptor, type=Listeners)
            except msgspec.DecodeError as error:
                raise ServiceError(f"process {other} runs another version: {error}") from error
            if len(there.ports) != len(ranks) + (other == 0):
                raise ConfigError(
                    f"process {other} on {found.host} has other ranks: give all processes the same "
                    "tensor_parallel, pipeline_parallel and nnodes"
                )
            ways += _ways_to(there, ranks, is_head=other == 0)
        pairs = [(rank, way) for rank in ranks_of(settings, number) for way in ways]
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            findings = list(threads.map(partial(_try, address), *zip(*pairs, strict=True)))
        meeting.leave(number)
        for other in others:
            if not meeting.wait_for_leave(other, deadline, _no_turn):
                raise ServiceError(f"process {other} has not finished")
    return findings


def _no_turn() -> None:
    """Sockets of this check make progress in a thread."""


def _ways_to(there: Listeners, ranks: range, is_head: bool) -> list[Way]:
    names = [*(["the head"] if is_head else []), *(f"rank {each}" for each in ranks)]
    ports = [*there.ports[len(ranks) :], *there.ports[: len(ranks)]]
    return [
        Way(name, there.address, port, there.token) for name, port in zip(names, ports, strict=True)
    ]


def _try(own: str, rank: int, way: Way) -> Finding:
    """Connect once, from an address of this host."""
    name = f"rank {rank} to {way.name}"
    where = f"{bracketed(way.address)}:{way.port}"
    began = time.monotonic()
    try:
        with socket.create_connection((way.address, way.port), CONNECT_S, (own, 0)) as link:
            token = link.recv(_TOKEN_BYTES, socket.MSG_WAITALL)
    except TimeoutError:
        text = (
            f"{where} does not answer {own} within {CONNECT_S:g} s: let the hosts of a worker "
            "reach each other at all ports"
        )
        return Finding(name, False, text)
    except OSError as error:
        text = f"{own} cannot connect to {where}: {error.strerror or error}"
        return Finding(name, False, f"{text}; see master_addr and host")
    if token != way.token:
        text = f"another program answers at {where}: give each host an address of its own in host"
        return Finding(name, False, text)
    return Finding(name, True, f"{where} answers in {(time.monotonic() - began) * 1e3:.1f} ms")


class _Answers:
    """This host's listening sockets and the thread that answers; a context manager."""

    def __init__(self, address: str, num_ranks: int, settings: PreflightSettings) -> None:
        """Raises ConfigError if the address is not of this host, or the head's port is taken."""
        self._stack = ExitStack()
        self._selector = selectors.DefaultSelector()
        self._stop = threading.Event()
        token = secrets.token_bytes(_TOKEN_BYTES)
        wanted = [0] * num_ranks + [settings.master_port] * (settings.preflight_index == 0)
        try:
            ports = [self._listen(address, each) for each in wanted]
        except BaseException:
            self._close()
            raise
        self.listeners = Listeners(address, ports, token)
        self._thread = threading.Thread(target=self._answer, name="answers", daemon=True)

    def _listen(self, address: str, port: int) -> int:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            opened = self._stack.enter_context(socket.create_server((address, port), family=family))
        except OSError as error:
            where = f"{bracketed(address)}:{port}" if port else address
            reason = os.strerror(error.errno or 0)
            raise ConfigError(f"cannot listen at {where}: {reason}") from error
        self._selector.register(opened, selectors.EVENT_READ)
        own_port: int = opened.getsockname()[1]
        return own_port

    def __enter__(self) -> _Answers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._close()

    def _close(self) -> None:
        self._selector.close()
        self._stack.close()

    def _answer(self) -> None:
        while not self._stop.is_set():
            for key, _ in self._selector.select(_PERIOD_S):
                assert isinstance(key.fileobj, socket.socket)
                with suppress(OSError), key.fileobj.accept()[0] as link:  # the client may have left
                    link.sendall(self.listeners.token)
