"""The path of KV between two workers, from the counters of the sender's links.

Workers report the bytes that they sent by link; traces say how many bytes of KV went to which
worker. A link that carried at least half of these is the path. Between workers of one machine, KV
that no link carried went through shared memory (CMA, CUDA IPC), by elimination. `UNKNOWN` if
neither applies. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from protocol.registration import WorkerInfo

UNKNOWN, TCP, RDMA, SHARED = "unknown", "TCP", "RDMA", "shared memory"
_LOCAL = ("CUDA IPC", "CMA")
_RDMA_LINK, _TCP_LINK = "rdma", "tcp:"
_SHARE = 0.5
LEAST_RATES = {"CUDA IPC": 5e9, RDMA: 1e9}
"""The lowest rate of these paths in bytes per second of busy time, with large writes. A slower pair
took another path."""
_LARGE_WRITE = 4 << 20
MIN_BYTES = 64 * 1024
"""Bytes below which messages of the control plane would count as KV."""


def measured_path(
    source: WorkerInfo, target: WorkerInfo, links: Mapping[str, int], moved_bytes: int
) -> str:
    """The path of `moved_bytes` of KV from `source` to workers at `target`'s address. `links` has
    the bytes that each of the source's links carried in the same time."""
    if source.transport == "shm":
        return SHARED
    if moved_bytes < MIN_BYTES or _TCP_LINK not in links:
        return UNKNOWN
    limit = _SHARE * moved_bytes
    if _tcp_bytes(source, target, links) >= limit:
        return TCP
    if links.get(_RDMA_LINK, 0) >= limit:
        return RDMA
    if not is_one_machine(source, target):
        return UNKNOWN
    return next((each for each in source.transport_paths if each in _LOCAL), SHARED)


def expected_path(source: WorkerInfo, target: WorkerInfo) -> str | None:
    """The best path that the machines of both have, whatever `UCX_TLS` allows; None if the source
    does not report its paths."""
    if source.transport == "shm":
        return SHARED
    return next(iter(_common(source, target, _machine_paths)), None)


def allowed_paths(source: WorkerInfo, target: WorkerInfo) -> tuple[str, ...]:
    """The paths that both workers allow, best first."""
    return _common(source, target, lambda info: info.transport_paths)


def narrowed(source: WorkerInfo, target: WorkerInfo) -> tuple[str, ...]:
    """Which of the two workers forbids, by `UCX_TLS`, the best path of their machines."""
    best = expected_path(source, target)
    if best is None or source.transport == "shm":
        return ()
    both = (source, target)
    return tuple(each.worker_id for each in both if best not in each.transport_paths)


def _machine_paths(info: WorkerInfo) -> tuple[str, ...]:
    """The paths without `UCX_TLS`; a worker of an earlier release reports only the allowed ones."""
    return info.machine_paths or info.transport_paths


def _common(
    source: WorkerInfo, target: WorkerInfo, of: Callable[[WorkerInfo], tuple[str, ...]]
) -> tuple[str, ...]:
    is_near = is_one_machine(source, target)
    both = [each for each in of(source) if each in of(target)]
    return tuple(each for each in both if is_near or each not in _LOCAL)


def is_below_way(
    expected: str | None, busy_bytes_per_s: float | None, mean_write_bytes: float
) -> bool:
    """Whether KV moved slower than its expected path allows. Small writes prove nothing, because
    they mostly wait."""
    least = LEAST_RATES.get(expected or "")
    if least is None or busy_bytes_per_s is None or mean_write_bytes < _LARGE_WRITE:
        return False
    return busy_bytes_per_s < least


def is_off_way(pair: Mapping[str, Any]) -> bool:
    """Whether a pair of `GET /fleet` took another path than expected, or was too slow for its
    path."""
    path, expected = pair["path"], pair["expected_path"]
    is_known = path != UNKNOWN and expected is not None
    return (is_known and path != expected) or bool(pair["is_below_way"])


def is_one_machine(source: WorkerInfo, target: WorkerInfo) -> bool:
    """Whether both are known to run on the same machine."""
    return bool(source.machine) and source.machine == target.machine


def is_tcp_link(link: str) -> bool:
    """Whether a worker's link carries TCP."""
    return link.startswith(_TCP_LINK)


def _tcp_bytes(source: WorkerInfo, target: WorkerInfo, links: Mapping[str, int]) -> int:
    """Bytes that went to the target over TCP: to its address, or on one machine to any local
    address."""
    if not is_one_machine(source, target):
        return links.get(f"{_TCP_LINK}{_address(target)}", 0)
    own = {_address(source), _address(target)}
    return sum(
        sent
        for link, sent in links.items()
        if link.startswith(_TCP_LINK) and _is_own(link.removeprefix(_TCP_LINK), own)
    )


def _is_own(address: str, own: set[str]) -> bool:
    return address in own or address.startswith("127.") or address == "::1"


def _address(info: WorkerInfo) -> str:
    return urlsplit(info.control).hostname or ""
