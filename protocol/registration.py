"""A worker's registration under its lease: its identity, its model, its endpoints."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from protocol.messages import Role


class WorkerState(StrEnum):
    """A worker's state as its lease shows it; only READY workers get new requests. A STALLED one
    has waiting requests and has done nothing for long; it is READY again once it does."""

    LOADING = "loading"
    READY = "ready"
    STALLED = "stalled"
    DRAINING = "draining"


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's registration under its lease, readable by every process.

    `incarnation` is new for every process, so a restarted worker counts as another worker.
    `control` and `events` are ZeroMQ endpoints (ROUTER and PUB). Processes with the same
    `machine` see each other's `pid`; "" means an unknown machine. `transport_paths` are for
    people to read. `texts_fingerprint` identifies the configuration and the tokenizer, which a
    router compares with its own. The limits of a step and the grace of a drain are the worker's
    settings; 0 if it does not tell. `start_ms`: how long each phase of its start took, in the order
    of the phases; empty until it has registered. One that `sends_weights` has files of them for
    workers that start.
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
    texts_fingerprint: str = ""
    transport_paths: tuple[str, ...] = ()
    max_batch_size: int = 0
    chunk_max_tokens: int = 0
    itl_target_ms: float = 0.0
    drain_grace_s: float = 0.0
    start_ms: dict[str, int] = {}
    sends_weights: bool = False
