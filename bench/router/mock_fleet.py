"""The fleet of the router's benchmark: mock workers behind real routers.

Measures their CPU and memory; knows no requests.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from bench.router.late_steps import Span, read_late_steps
from bench.router.mock_worker import MockSettings
from bench.tools.fleet import BenchFleet, FleetConfig
from protocol.messages import Role


@dataclass(frozen=True)
class RouterFleetConfig:
    """The fleet to run: `roles` are those of the mock workers, each in its own process; `burst` is
    described in `bench.router.mock_worker`."""

    model: Path
    roles: tuple[Role, ...]
    token_ids: list[int]
    max_context: int
    num_routers: int = 1
    step_ms: float = 0.0
    burst: int = 1
    router_flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Usage:
    """The usage of a server's processes: CPU seconds so far, and resident bytes now."""

    cpu_s: float
    rss_bytes: int


class RouterFleet(BenchFleet):
    """A fleet whose workers compute nothing."""

    name = "baton"

    def __init__(self, config: RouterFleetConfig) -> None:
        super().__init__(
            FleetConfig(
                str(config.model),
                num_routers=config.num_routers,
                num_prefill=config.roles.count(Role.PREFILL),
                num_decode=config.roles.count(Role.DECODE),
                router_flags=("--max-inflight=4096", *config.router_flags),
            )
        )
        self._mock = config

    @property
    def model_name(self) -> str:
        """The model's name in requests."""
        return self._mock.model.name

    @property
    def targets(self) -> list[tuple[str, int]]:
        """The routers' addresses."""
        return [("127.0.0.1", self.port(router)) for router in self.names("router")]

    def usage(self) -> Usage:
        """The total usage of all routers and their children."""
        return usage_of([self.pids[router] for router in self.names("router")])

    def late_steps(self, worker: str) -> list[Span]:
        """All late steps of a worker so far. Raises OSError before it runs."""
        return read_late_steps(self._late_steps_file(worker))

    def _late_steps_file(self, worker: str) -> Path:
        return self._processes.folder / f"{worker}.late"

    def _worker_command(self, role: str, name: str) -> list[str]:
        settings = MockSettings(
            worker_id=name,
            redis_url=self.valkey.url,
            cluster_secret=self.secret,
            model=self.model_name,
            token_ids=self._mock.token_ids,
            max_context=self._mock.max_context,
            step_ms=self._mock.step_ms,
            burst=self._mock.burst,
            late_steps=str(self._late_steps_file(name)),
            parent_pid=os.getpid(),
        )
        return ["bench.router.mock_worker", role, msgspec.json.encode(settings).decode()]


def usage_of(pids: list[int]) -> Usage:
    """The total usage of processes and their children."""
    cpu_s, rss_bytes = 0.0, 0
    for pid in pids:
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            times = each.cpu_times()
            cpu_s += times.user + times.system
            rss_bytes += each.memory_info().rss
    return Usage(cpu_s, rss_bytes)
