"""The paths that UCX may take from a pool on this machine, best first.

UCX chooses a path for each peer and does not report its choice; `UCX_TLS` narrows the choice
(https://openucx.readthedocs.io/en/master/faq.html). The paths listed here are allowed by `UCX_TLS`
and available: to a peer on the same host UCX takes the first path that stays on the host.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

_log = logging.getLogger(__name__)

CUDA_IPC = "CUDA IPC"
_ALIASES = {
    CUDA_IPC: {"all", "cuda", "cuda_ipc"},
    "RDMA": {"all", "ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "dc", "dc_x", "dc_mlx5"},
    "CMA": {"all", "sm", "shm", "cma"},
    "TCP": {"all", "tcp"},
}
"""Names in `UCX_TLS` that allow a path."""


def ucx_paths(
    device: str, environment: Mapping[str, str], system: Path = Path("/sys/class")
) -> tuple[str, ...]:
    """Those of "CUDA IPC", "RDMA", "CMA" and "TCP" that can reach a pool on `device`.

    CUDA IPC (one host) is for pools on a card, CMA (one host) for pools in memory; RDMA needs an
    adapter. TCP moves a pool on a card through the host.
    """
    on_card = device.startswith("cuda")
    there = {
        CUDA_IPC: on_card,
        "RDMA": _has_entries(system / "infiniband"),
        "CMA": not on_card,
        "TCP": True,
    }
    setting = environment.get("UCX_TLS", "all").strip()
    forbids = setting.startswith("^")
    named = {name.strip() for name in setting.removeprefix("^").split(",")}
    return tuple(
        path for path in there if there[path] and bool(named & _ALIASES[path]) is not forbids
    )


def machine_paths(paths: tuple[str, ...], device: str) -> tuple[str, ...]:
    """The paths that a transport with these `paths` would have if nothing narrowed them."""
    return ucx_paths(device, {}) if paths else ()


def usable_paths(paths: tuple[str, ...], why_not_shareable: str) -> tuple[str, ...]:
    """The paths that a transport reports, without CUDA IPC if the pool cannot be shared; a warning
    says so, because UCX takes a slower path silently."""
    if CUDA_IPC not in paths or not why_not_shareable:
        return paths
    others = tuple(path for path in paths if path != CUDA_IPC)
    _log.warning(
        "KV blocks on one host move by %s, much slower than by CUDA IPC, because other processes "
        "cannot open this card's pool: %s",
        " or ".join(others),
        why_not_shareable,
    )
    return others


def _has_entries(folder: Path) -> bool:
    try:
        return any(folder.iterdir())
    except OSError:
        return False
