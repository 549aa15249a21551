"""A worker's registration under its lease: its identity, its model, its endpoints."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from protocol.messages import Role


class WorkerState(StrEnum):
    """A worker's state as its lease shows it; only READY workers get new requests."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's registration under its lease, readable by every process.

    `incarnation` is new for every process, so a restarted worker counts as another worker.
    `control` and `events` are ZeroMQ endpoints (ROUTER and PUB). Processes with the same
    `machine` see each other's `pid`; "" means an unknown machine. `transport_paths` are for
    people to read.
    """

    worker_id: str
    incarnation: str
    role: Role
    state: WorkerState
    host: str
    pid: int
    control: str
    events: str
    protocol_version: int
    model: str
    model_fingerprint: str
    layout_fingerprint: str
    transport: str
    block_size: int
    num_blocks: int
    max_context: int
    machine: str = ""
    transport_paths: tuple[str, ...] = ()
