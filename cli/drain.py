"""`baton drain WORKER`: a worker gets no new requests, finishes its present ones, and ends.

The drain request goes through the fleet's Redis; the worker finds it at its next lease renewal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cli.arguments import split_names
from process.settings import setting, setting_of, settings_or_exit
from process.store.drain_requests import request_drain
from process.store.fleet_watcher import read_fleet
from process.store.store_url import store_url
from protocol.errors import ConfigError, ServiceError
from worker.settings import WorkerSettings

_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class DrainSettings:
    """Settings of `baton drain`."""

    redis_url: str = setting_of(WorkerSettings, "redis_url")
    redis_ca_file: str | None = setting_of(WorkerSettings, "redis_ca_file")
    redis_cert_file: str | None = setting_of(WorkerSettings, "redis_cert_file")
    redis_key_file: str | None = setting_of(WorkerSettings, "redis_key_file")
    cluster: str = setting_of(WorkerSettings, "cluster")
    wait_s: float = setting(
        60.0, help="how long to wait until the worker has left; 0: not at all", unit="s", minimum=0
    )


def main(argv: Sequence[str]) -> int:
    """Ask a worker to drain and wait until it has left; returns 1 if it is still there. Raises
    ServiceError for an unknown worker."""
    flags, names = split_names(DrainSettings, argv)
    settings = settings_or_exit(
        DrainSettings,
        flags,
        prog="baton drain WORKER",
        description="Take a worker out of its fleet: it finishes what it has, and ends.",
    )
    if len(names) != 1:
        raise ConfigError(f"name one worker, not {len(names)}; baton status shows them")
    url = store_url(settings)
    info = request_drain(url, settings.cluster, names[0])
    if info is None:
        raise ServiceError(f"no worker {names[0]} is registered")
    print(f"{names[0]} is asked to drain")
    deadline = time.monotonic() + settings.wait_s
    while time.monotonic() < deadline:
        found = read_fleet(url, settings.cluster).get(names[0])
        if found is None or found.incarnation != info.incarnation:
            print(f"{names[0]} has left")
            return 0
        time.sleep(_POLL_S)
    if settings.wait_s:
        print(f"{names[0]} is still there after {settings.wait_s:g} s", file=sys.stderr)
        return 1
    return 0
