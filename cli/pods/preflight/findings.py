"""Checks of one host: its store, secret, memory, limits, clock, interfaces and card.

Each check returns a Finding, whose text says what is missing and how to provide it. Paths of the
system are arguments, so that tests can show another system.
"""

from __future__ import annotations

import os
import resource
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import redis

from process.store.first_contact import advised
from process.store.registry import client_from_url
from protocol.errors import ConfigError

MIB = 1 << 20
MIN_SHARED_MEMORY_MIB = 64
MIN_OPEN_FILES = 4096
MAX_CLOCK_OFFSET_S = 1.0
STORE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Finding:
    """The result of one check; `is_ok` is None for a warning."""

    name: str
    is_ok: bool | None
    text: str

    def __str__(self) -> str:
        mark = {True: "ok  ", False: "FAIL", None: "warn"}[self.is_ok]
        return f"{mark}  {self.name}: {self.text}"


def check_store(redis_url: str) -> Finding:
    """Whether the store answers and lets this process write."""
    try:
        with client_from_url(redis.Redis, redis_url, STORE_TIMEOUT_S) as client:
            started = time.monotonic()
            client.set(f"baton:preflight:{os.getpid()}", "1", ex=10)
            took_ms = (time.monotonic() - started) * 1000
    except (redis.RedisError, OSError, ConfigError) as error:
        text = advised(redis_url, error)
        return Finding("store", False, f"{text}; see the store's pod and its NetworkPolicy")
    return Finding("store", True, f"answers in {took_ms:.1f} ms")


def check_clock(redis_url: str) -> Finding:
    """The difference between this host's clock and the store's. Logs and traces of skewed hosts do
    not line up."""
    try:
        with client_from_url(redis.Redis, redis_url, STORE_TIMEOUT_S) as client:
            before = time.time()
            seconds, microseconds = client.time()
            offset_s = seconds + microseconds / 1e6 - (before + time.time()) / 2
    except (redis.RedisError, OSError, ConfigError) as error:
        return Finding("clock", None, f"not compared: {error}")
    text = f"{offset_s * 1000:+.0f} ms from the store's"
    if abs(offset_s) > MAX_CLOCK_OFFSET_S:
        return Finding("clock", None, f"{text}: run a time service on this host")
    return Finding("clock", True, text)


def check_interfaces(names: Sequence[str], system: Path = Path("/sys/class")) -> Finding:
    """Whether the interfaces for KV blocks exist, and RDMA ports have a link."""
    have = sorted(
        each.name
        for kind in ("net", "infiniband")
        if (system / kind).is_dir()
        for each in (system / kind).iterdir()
    )
    for name in names:
        device, _, port = name.partition(":")
        if device not in have:
            return Finding(
                "interfaces",
                False,
                f"{name} is not here, only {', '.join(have)}: name another in kv.interfaces, or "
                "give the pod the device (rdma.resource)",
            )
        state = system / "infiniband" / device / "ports" / (port or "1") / "state"
        if state.exists() and "ACTIVE" not in state.read_text():
            return Finding("interfaces", False, f"{name} is {state.read_text().strip()}")
    return Finding("interfaces", True, ", ".join(names) or "none: this host only")


def check_locked_memory(
    names: Sequence[str], needed_bytes: int, system: Path = Path("/sys/class")
) -> Finding:
    """Whether RDMA can pin its memory. Only RDMA needs to."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_rdma = any((system / "infiniband" / each.partition(":")[0]).exists() for each in names)
    if limit == resource.RLIM_INFINITY:
        return Finding("locked memory", True, "unlimited")
    text = f"limited to {limit / MIB:.0f} MiB"
    if is_rdma and limit < needed_bytes:
        return Finding(
            "locked memory",
            False,
            f"{text}, and RDMA pins the whole KV pool: set LimitMEMLOCK=infinity for the "
            "container runtime of this node",
        )
    return Finding("locked memory", True, f"{text}; only RDMA needs more")


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """Whether /dev/shm has room for UCX's segments."""
    if not folder.is_dir():
        return Finding("shared memory", False, f"there is no {folder}: mount one")
    free_mib = shutil.disk_usage(folder).free // MIB
    if free_mib < MIN_SHARED_MEMORY_MIB:
        return Finding("shared memory", False, f"{free_mib} MiB are free: raise workers.shmSize")
    return Finding("shared memory", True, f"{free_mib} MiB are free")


def check_open_files() -> Finding:
    """Whether a router of this host could hold its connections."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < MIN_OPEN_FILES:
        return Finding("open files", None, f"limited to {limit}: {MIN_OPEN_FILES} or more are wise")
    return Finding("open files", True, f"{limit}")


def check_card(device: str) -> Finding:
    """Whether torch can use the card, with its name, memory and driver's CUDA."""
    if device == "cpu":
        return Finding("card", True, "none wanted")
    import torch  # slow to import

    has_card = torch.cuda.is_available()
    if device == "auto" and not has_card:
        return Finding("card", True, "none, so workers would run on the CPU")
    if not has_card:
        return Finding(
            "card",
            False,
            f"torch {torch.__version__} sees none: the pod asks for no nvidia.com/gpu, the image "
            "has no CUDA, or the node has no driver",
        )
    properties = torch.cuda.get_device_properties(0)
    return Finding(
        "card",
        True,
        f"{properties.name}, {properties.total_memory // MIB} MiB, CUDA {torch.version.cuda}",
    )
