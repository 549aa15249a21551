"""Which ways UCX may take between two pools on this machine, best first.

UCX chooses among them for each peer and does not say which it took; `UCX_TLS` narrows the choice
(https://openucx.readthedocs.io/en/master/faq.html). What is named here is allowed by it and there
to be used: a path to a peer on one host is the first of those that stay on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_ALIASES = {
    "CUDA IPC": {"all", "cuda", "cuda_ipc"},
    "RDMA": {"all", "ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "dc", "dc_x", "dc_mlx5"},
    "CMA": {"all", "sm", "shm", "cma"},
    "TCP": {"all", "tcp"},
}
"""Names of `UCX_TLS` that let a path be taken."""


def ucx_paths(
    device: str, environment: Mapping[str, str], system: Path = Path("/sys/class")
) -> tuple[str, ...]:
    """Of "CUDA IPC", "RDMA", "CMA" and "TCP" those that a pool on `device` can be reached by.

    CUDA IPC (one host) is for pools on a card, CMA (one host) for pools in memory; RDMA needs an
    adapter. A pool on a card goes over TCP through the host.
    """
    on_card = device.startswith("cuda")
    there = {
        "CUDA IPC": on_card,
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


def _has_entries(folder: Path) -> bool:
    try:
        return any(folder.iterdir())
    except OSError:
        return False
