"""A fleet of real processes for a benchmark: routers and workers by the `baton` command, a Valkey.

Owns them. Processes have names (`decode-2`), by which they can be killed and restarted. Knows no
requests.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from bench.tools.processes import Processes
from process.store.embedded_valkey import EmbeddedValkey
from protocol.errors import BatonError

_POLL_S = 0.05
_START_S = 120.0
_LEFT_POLL_S = 0.2
_UNDER_WAY = ("num_waiting", "num_running", "blocks_used", "num_handoffs")


@dataclass(frozen=True)
class OtherNode:
    """A host's part of a worker of this role whose ranks span several hosts: beside `flags` it has
    those of the worker, and `prefix` is a command that runs it there."""

    role: str
    flags: tuple[str, ...]
    prefix: tuple[str, ...] = ()


@dataclass(frozen=True)
class FleetConfig:
    """The fleet's size, its model, and the flags of each kind of process; `role_flags` are for
    prefill or decode workers alone, or for one process by its name; `role_prefix` is a command that
    runs the workers of a role, and `worker_module` what they run. `other_nodes` are parts of
    workers, by names that begin with `node`. The store listens on `store_host`."""

    model: str
    num_routers: int = 1
    num_prefill: int = 1
    num_decode: int = 1
    worker_flags: tuple[str, ...] = ()
    router_flags: tuple[str, ...] = ()
    role_flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    role_prefix: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    store_host: str = "127.0.0.1"
    worker_module: str = "cli.main"
    other_nodes: Mapping[str, OtherNode] = field(default_factory=dict)


def small_fleet(model: str, num_blocks: int) -> FleetConfig:
    """Two processes of each role; workers compute in fp32 on one core each, with small chunks."""
    flags = ("--dtype=float32", "--device=cpu", "--torch-threads=1", "--chunk-max-tokens=128")
    return FleetConfig(model, 2, 2, 2, worker_flags=(*flags, f"--num-blocks={num_blocks}"))


class BenchFleet:
    """Routers, prefill and decode workers by name; a context manager. Raises BatonError from
    `__enter__` and `wait_ready` if they do not come up."""

    make_processes = Processes

    def __init__(self, config: FleetConfig) -> None:
        self.valkey = EmbeddedValkey(host=config.store_host)
        self.secret = secrets.token_urlsafe(32)
        self._config = config
        self._processes = self.make_processes("bench")

    @property
    def pids(self) -> dict[str, int]:
        """Pids of the current processes, by name."""
        return self._processes.pids

    def names(self, role: str) -> list[str]:
        """All processes of a role, alive or not."""
        return [name for name in self.pids if name.startswith(role)]

    def url(self, router: str) -> str:
        """The URL of a router's current process."""
        return f"http://127.0.0.1:{self.port(router)}"

    def port(self, router: str) -> int:
        """The port of a router's current process. Raises OSError, ValueError before it listens."""
        return int(self._port_file(router).read_text())

    def __enter__(self) -> Self:
        config = self._config
        counts = {
            "prefill": config.num_prefill,
            "decode": config.num_decode,
            "router": config.num_routers,
        }
        try:
            self.valkey.start()
            for name in config.other_nodes:
                self.start(name)
            for role, count in counts.items():
                for number in range(1, count + 1):
                    self.start(f"{role}-{number}")
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self, name: str) -> None:
        """Start or restart a process."""
        role = name.partition("-")[0]
        prefix = self._config.role_prefix.get(role, ())
        if role == "router":
            self._port_file(name).unlink(missing_ok=True)
            command = self._router_command(name)
        elif role == "node":
            node = self._config.other_nodes[name]
            prefix = node.prefix
            command = [*self._worker_command(node.role, name), *node.flags]
        else:
            command = self._worker_command(role, name)
        self._processes.start(name, [*prefix, *self._python(command)], self._shared)

    def _router_command(self, name: str) -> list[str]:
        return [
            "cli.main",
            "router",
            f"--model={self._config.model}",
            "--port=0",
            f"--port-file={self._port_file(name)}",
            f"--parent-pid={os.getpid()}",
            *self._config.router_flags,
            *self._config.role_flags.get(name, ()),
        ]

    def _worker_command(self, role: str, name: str) -> list[str]:
        return [
            self._config.worker_module,
            role,
            f"--model={self._config.model}",
            f"--worker-id={name}",
            f"--parent-pid={os.getpid()}",
            *self._config.worker_flags,
            *self._config.role_flags.get(role, ()),
            *self._config.role_flags.get(name, ()),
        ]

    def forget(self, name: str) -> None:
        """Remove an ended process from the fleet."""
        self._processes.forget(name)

    def run_second(self, name: str, timeout_s: float) -> int:
        """Start a second worker with the id of one that runs; its exit status. Raises
        TimeoutExpired if it does not end."""
        role = name.partition("-")[0]
        second = f"second {name}"
        self._processes.start(second, self._python(self._worker_command(role, name)), self._shared)
        try:
            return self._processes.wait_end(second, timeout_s)
        finally:
            self._processes.end([second])
            self._processes.forget(second)

    @property
    def _shared(self) -> dict[str, str]:
        """The settings that every process of the fleet needs."""
        return {"BATON_REDIS_URL": self.valkey.url, "BATON_CLUSTER_SECRET": self.secret}

    @staticmethod
    def _python(command: list[str]) -> list[str]:
        return [sys.executable, "-m", *command]

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal if the process runs."""
        self._processes.signal(name, number)

    def wait_end(self, name: str, timeout_s: float) -> int:
        """Wait for the process to end; returns its exit status. Raises TimeoutExpired."""
        return self._processes.wait_end(name, timeout_s)

    def workers(self, router: str) -> dict[str, dict[str, Any]]:
        """The members in `GET /fleet` of a router, by worker id, without those that were lost;
        empty if the router does not answer."""
        try:
            with urllib.request.urlopen(f"{self.url(router)}/fleet", timeout=5) as answer:
                shown = json.load(answer)["workers"]
                return {e["worker_id"]: e for e in shown if e["state"] != "lost"}
        except (OSError, ValueError):
            return {}

    def is_ready(self) -> bool:
        """Whether every router serves and uses the current process of every worker."""
        pids = self.pids
        workers = self.names("prefill") + self.names("decode")
        return all(
            shown.get(name, {}).get("pid") == pids[name]
            and shown[name]["connected"]
            and shown[name]["state"] == "ready"
            for shown in map(self.workers, self.names("router"))
            for name in workers
        ) and all(map(self._serves, self.names("router")))

    def _serves(self, router: str) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url(router)}/health", timeout=5):
                return True
        except (OSError, ValueError):
            return False

    def wait_ready(self) -> None:
        """Wait until `is_ready`. Raises BatonError with the logs; at once if a process ended."""
        deadline = time.monotonic() + _START_S
        while not self.is_ready():
            is_whole = all(map(self._processes.is_running, self.pids))
            if not is_whole or time.monotonic() > deadline:
                raise BatonError(f"the fleet is not whole:\n{self._processes.log_tails()}")
            time.sleep(_POLL_S)

    def left_over(self, patience_s: float = 20.0) -> int:
        """Work that is still under way on workers after the load has ended; 0 once there is none.

        Only reports that workers send after the call count; -1 if they send none.
        """
        called_us = time.time_ns() // 1000
        deadline = time.monotonic() + patience_s
        while True:
            shown = self.workers(self.names("router")[0]).values()
            left = sum(worker[gauge] for worker in shown for gauge in _UNDER_WAY)
            is_told = bool(shown) and all(each["reported_us"] > called_us for each in shown)
            if (is_told and not left) or time.monotonic() > deadline:
                return left if is_told else -1
            time.sleep(_LEFT_POLL_S)

    def stop(self) -> None:
        """End all processes in order."""
        for role in ("router", "prefill", "decode", "node"):
            self._processes.end(self.names(role))
        self._processes.close()
        self.valkey.stop()

    def _port_file(self, router: str) -> Path:
        return self._processes.folder / f"{router}.port"
