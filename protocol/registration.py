"""What a worker registers under its lease: who it is, what it serves, how it is reached."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from protocol.messages import Role


class WorkerState(StrEnum):
    """Life of a worker as its lease shows it; only READY ones get new requests."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker registers under its lease, for everyone to read.

    `incarnation` is new for every process, so a restarted worker is another worker.
    `control` and `events` are ZeroMQ endpoints (ROUTER and PUB). Processes with the same
    `machine` see each other by `pid`; "" is nobody's. `transport_paths` are for people to read.
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
