"""Asks a worker to drain, through the store, and takes such a request back."""

from __future__ import annotations

from typing import Any

import redis
from redis.exceptions import RedisError

from process.store.fleet_watcher import read_fleet
from process.store.registry import Registry, client_from_url
from protocol.errors import ServiceError
from protocol.registration import WorkerInfo

RESUME = b"resume:"
"""Prefix of the incarnation of a worker whose drain is taken back."""
_DRAIN_REQUEST_S = 60


def request_drain(
    redis_url: str, cluster: str, worker_id: str, timeout_s: float = 5.0
) -> WorkerInfo | None:
    """Ask a worker to drain; returns its registration, or None if there is none.

    The worker sees the request at its next renewal. Raises ConfigError, or ServiceError if the
    store fails.
    """
    return _ask_worker(redis_url, cluster, worker_id, b"", timeout_s)


def request_resume(
    redis_url: str, cluster: str, worker_id: str, timeout_s: float = 5.0
) -> WorkerInfo | None:
    """Take a request to drain back; returns the worker's registration, or None if it has left.

    A worker that was stopped by a signal, or that has nothing left to do, ends nevertheless. Raises
    as `request_drain`.
    """
    return _ask_worker(redis_url, cluster, worker_id, RESUME, timeout_s)


def _ask_worker(
    redis_url: str, cluster: str, worker_id: str, what: bytes, timeout_s: float
) -> WorkerInfo | None:
    info = read_fleet(redis_url, cluster, timeout_s).get(worker_id)
    if info is None:
        return None
    client: Any = client_from_url(redis.Redis, redis_url, timeout_s)
    value = what + info.incarnation.encode()
    try:
        client.set(Registry(cluster).drain_key(worker_id), value, ex=_DRAIN_REQUEST_S)
    except (RedisError, OSError) as error:
        raise ServiceError(f"cannot ask {worker_id}: {error}") from error
    finally:
        client.close()
    return info
