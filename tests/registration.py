"""A worker's registration for tests to which most of its fields do not matter."""

from __future__ import annotations

from typing import Any

from protocol.messages import PROTOCOL_VERSION, Role
from protocol.registration import WorkerInfo, WorkerState


def registration(worker_id: str, incarnation: str = "life-1", **changes: Any) -> WorkerInfo:
    """The registration of a ready decode worker. `changes` replace its fields."""
    fields: dict[str, Any] = {
        "role": Role.DECODE,
        "state": WorkerState.READY,
        "host": "h",
        "pid": 1,
        "control": "tcp://127.0.0.1:1",
        "events": "tcp://127.0.0.1:2",
        "protocol_version": PROTOCOL_VERSION,
        "model": "m",
        "model_fingerprint": "f",
        "layout_fingerprint": "l",
        "transport": "shm",
        "block_size": 16,
        "num_blocks": 8,
        "max_context": 64,
    }
    return WorkerInfo(worker_id=worker_id, incarnation=incarnation, **(fields | changes))
