"""A fleet of real processes for the chaos bench: started by the `baton` command, killed at will.

Owns the processes and a Valkey; knows nothing of requests.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.embedded import EmbeddedValkey

_POLL_S = 0.05
_START_S = 120.0
_WORKER_FLAGS = ("--dtype=float32", "--device=cpu", "--torch-threads=1", "--chunk-max-tokens=128")


@dataclass(frozen=True)
class ChaosConfig:
    """How large the fleet is, and what it serves."""

    model: str
    num_routers: int = 2
    num_prefill: int = 2
    num_decode: int = 2
    num_blocks: int = 1024
    worker_flags: tuple[str, ...] = _WORKER_FLAGS
    extra: dict[str, str] = field(default_factory=dict)


class ChaosFleet:
    """Routers, prefill and decode workers by name (`decode-2`); a context manager."""

    def __init__(self, config: ChaosConfig) -> None:
        self._config = config
        self._valkey = EmbeddedValkey()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="baton-chaos-")
        self._secret = secrets.token_urlsafe(32)

    @property
    def valkey(self) -> EmbeddedValkey:
        """The store."""
        return self._valkey

    @property
    def pids(self) -> dict[str, int]:
        """Of the processes in their present lives."""
        return {name: process.pid for name, process in self._processes.items()}

    def names(self, role: str) -> list[str]:
        """All processes of a role, alive or not."""
        return [name for name in self._processes if name.startswith(role)]

    def url(self, router: str) -> str:
        """Where a router listens in its present life."""
        return f"http://127.0.0.1:{self._port_file(router).read_text().strip()}"

    def __enter__(self) -> ChaosFleet:
        self._valkey.start()
        config = self._config
        counts = {
            "prefill": config.num_prefill,
            "decode": config.num_decode,
            "router": config.num_routers,
        }
        try:
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
        """Start a process, or start it anew."""
        role = name.partition("-")[0]
        flags = [f"--model={self._config.model}", f"--parent-pid={os.getpid()}"]
        if role == "router":
            self._port_file(name).unlink(missing_ok=True)
            flags += ["--port=0", f"--port-file={self._port_file(name)}"]
        else:
            flags += [*self._config.worker_flags, f"--worker-id={name}"]
            flags.append(f"--num-blocks={self._config.num_blocks}")
        env = {**os.environ, "BATON_REDIS_URL": self._valkey.url}
        env |= {**self._config.extra, "BATON_CLUSTER_SECRET": self._secret}
        with open(self._path(f"{name}.log"), "ab") as log_file:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", "cli.main", role, *flags],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal if it runs."""
        self._processes[name].send_signal(number)

    def wait_end(self, name: str, timeout_s: float) -> int:
        """Its exit status, once it has ended. Raises TimeoutExpired."""
        return self._processes[name].wait(timeout_s)

    def pid(self, name: str) -> int:
        """Of its present life."""
        return self._processes[name].pid

    def is_running(self, name: str) -> bool:
        """Whether it has not ended; a stopped process runs."""
        return self._processes[name].poll() is None

    def workers(self, router: str) -> dict[str, dict[str, Any]]:
        """`GET /fleet` of a router, by worker id; nothing if it does not answer."""
        try:
            with urllib.request.urlopen(f"{self.url(router)}/fleet", timeout=5) as answer:
                return {each["worker_id"]: each for each in json.load(answer)}
        except (OSError, ValueError):
            return {}

    def is_ready(self) -> bool:
        """Whether every router uses the present life of every worker."""
        pids = self.pids
        workers = self.names("prefill") + self.names("decode")
        return all(
            shown.get(name, {}).get("pid") == pids[name]
            and shown[name]["connected"]
            and shown[name]["state"] == "ready"
            for shown in map(self.workers, self.names("router"))
            for name in workers
        )

    def wait_ready(self) -> None:
        """Until `is_ready`. Raises RuntimeError with the logs of what ended."""
        deadline = time.monotonic() + _START_S
        while not self.is_ready():
            if time.monotonic() > deadline:
                raise RuntimeError("the fleet is not whole again:\n" + self._tails())
            time.sleep(_POLL_S)

    def stop(self) -> dict[str, int]:
        """End everything in order; exit statuses by name."""
        for role in ("router", "prefill", "decode"):
            for name in self.names(role):
                self.signal(name, signal.SIGCONT)
                self.signal(name, signal.SIGTERM)
            for name in self.names(role):
                try:
                    self._processes[name].wait(30)
                except subprocess.TimeoutExpired:
                    self._processes[name].kill()
        statuses = {name: process.wait() for name, process in self._processes.items()}
        self._valkey.stop()
        self._folder.cleanup()
        return statuses

    def _path(self, name: str) -> Path:
        return Path(self._folder.name) / name

    def _port_file(self, router: str) -> Path:
        return self._path(f"{router}.port")

    def _tails(self) -> str:
        logs = sorted(Path(self._folder.name).glob("*.log"))
        return "\n".join(f"{log.name}: {log.read_text()[-800:]}" for log in logs)
