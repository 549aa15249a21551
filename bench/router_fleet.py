"""The processes of the router's benchmark: a Valkey, mock workers and real routers.

Owns them, and reads what a router costs from /proc. Knows nothing of requests.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from bench.mock_worker import MockSettings
from protocol.messages import Role
from runtime.embedded import EmbeddedValkey

_START_S = 60.0
_POLL_S = 0.05
_END_S = 15.0


@dataclass(frozen=True)
class RouterFleetConfig:
    """What runs: `roles` are those of the mock workers, each in a process of its own."""

    model: Path
    roles: tuple[Role, ...]
    token_ids: list[int]
    max_context: int
    num_routers: int = 1
    step_ms: float = 0.0


@dataclass(frozen=True)
class Usage:
    """What a server's processes have used: CPU seconds, and resident bytes now."""

    cpu_s: float
    rss_bytes: int


class RouterFleet:
    """Started as a context manager; `targets` are the routers' addresses then."""

    name = "baton"

    def __init__(self, config: RouterFleetConfig) -> None:
        self.targets: list[tuple[str, int]] = []
        self._config = config
        self._valkey = EmbeddedValkey()
        self._folder = tempfile.TemporaryDirectory(prefix="baton-router-bench-")
        self._secret = secrets.token_urlsafe(32)
        self._workers: list[subprocess.Popen[bytes]] = []
        self._routers: list[subprocess.Popen[bytes]] = []

    @property
    def model_name(self) -> str:
        """As requests name it."""
        return self._config.model.name

    def __enter__(self) -> RouterFleet:
        try:
            self._valkey.start()
            for number, role in enumerate(self._config.roles):
                self._workers.append(self._start_worker(role, f"{role.value}-{number}"))
            for number in range(self._config.num_routers):
                self._routers.append(self._start_router(number))
            self.targets = [self._wait_ready(n) for n in range(self._config.num_routers)]
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def usage(self) -> Usage:
        """Of all routers together, their children included."""
        return usage_of([each.pid for each in self._routers])

    def _start_worker(self, role: Role, worker_id: str) -> subprocess.Popen[bytes]:
        settings = MockSettings(
            worker_id=worker_id,
            redis_url=self._valkey.url,
            cluster_secret=self._secret,
            model=self.model_name,
            token_ids=self._config.token_ids,
            max_context=self._config.max_context,
            step_ms=self._config.step_ms,
            parent_pid=os.getpid(),
        )
        command = [role.value, msgspec.json.encode(settings).decode()]
        return self._spawn(["bench.mock_worker", *command], worker_id)

    def _start_router(self, number: int) -> subprocess.Popen[bytes]:
        flags = [
            f"--model={self._config.model}",
            "--port=0",
            f"--port-file={self._port_file(number)}",
            f"--parent-pid={os.getpid()}",
            "--max-inflight=4096",
        ]
        return self._spawn(["cli.main", "router", *flags], f"router-{number}")

    def _spawn(self, command: list[str], name: str) -> subprocess.Popen[bytes]:
        env = {
            **os.environ,
            "BATON_REDIS_URL": self._valkey.url,
            "BATON_CLUSTER_SECRET": self._secret,
        }
        with open(self._path(f"{name}.log"), "ab") as log_file:
            return subprocess.Popen(
                [sys.executable, "-m", *command],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait_ready(self, number: int) -> tuple[str, int]:
        """The router's address, once it uses every worker. Raises RuntimeError with the logs."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            try:
                port = int(self._port_file(number).read_text())
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/fleet", timeout=5) as answer:
                    shown = msgspec.json.decode(answer.read())
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                        pass
            except (OSError, ValueError):
                shown = []
            if sum(each["connected"] for each in shown) == len(self._workers):
                return "127.0.0.1", port
            time.sleep(_POLL_S)
        logs = sorted(Path(self._folder.name).glob("*.log"))
        tails = "\n".join(f"{log.name}: {log.read_text()[-800:]}" for log in logs)
        raise RuntimeError(f"the fleet did not become ready:\n{tails}")

    def _stop(self) -> None:
        end_processes(self._routers)
        end_processes(self._workers)
        self._valkey.stop()
        self._folder.cleanup()

    def _path(self, name: str) -> Path:
        return Path(self._folder.name) / name

    def _port_file(self, number: int) -> Path:
        return self._path(f"router-{number}.port")


def usage_of(pids: list[int]) -> Usage:
    """What processes and their children use together."""
    cpu_s, rss_bytes = 0.0, 0
    for pid in pids:
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            times = each.cpu_times()
            cpu_s += times.user + times.system
            rss_bytes += each.memory_info().rss
    return Usage(cpu_s, rss_bytes)


def end_processes(processes: list[subprocess.Popen[bytes]]) -> None:
    """Ask each to stop, then make it."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
