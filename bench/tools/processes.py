"""Processes of a benchmark by name: started, signalled, ended in order; each writes a log.

Owns them and the folder of their logs, which `close` removes. Knows nothing of what they do.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

_END_S = 30.0
_TAIL_CHARS = 800


class Processes:
    """What one benchmark runs. A name that is started again is another life of the same."""

    def __init__(self, purpose: str) -> None:
        """`purpose` is in the name of the folder."""
        self._folder = tempfile.TemporaryDirectory(prefix=f"baton-{purpose}-")
        self._lives: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def folder(self) -> Path:
        """Where the logs are, and what the processes themselves write may be."""
        return Path(self._folder.name)

    @property
    def pids(self) -> dict[str, int]:
        """Of the present lives, in the order in which the names were first started."""
        return {name: life.pid for name, life in self._lives.items()}

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a process, or start it anew; `environment` is added to ours."""
        with open(self.folder / f"{name}.log", "ab") as log_file:
            self._lives[name] = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal if it runs."""
        self._lives[name].send_signal(number)

    def wait_end(self, name: str, timeout_s: float) -> int:
        """Its exit status, once it has ended. Raises TimeoutExpired."""
        return self._lives[name].wait(timeout_s)

    def is_running(self, name: str) -> bool:
        """Whether it has not ended; a stopped process runs."""
        return self._lives[name].poll() is None

    def end(self, names: Iterable[str]) -> None:
        """See `end_processes`."""
        end_processes([self._lives[name] for name in names])

    def log_tails(self) -> str:
        """The end of every log."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(
            f"{log.name}: {log.read_text(errors='replace')[-_TAIL_CHARS:]}" for log in logs
        )

    def close(self) -> None:
        """End whatever still runs. May be called twice."""
        self.end(self._lives)
        self._folder.cleanup()


def end_processes(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask all of them to stop, also those that stand still, and make whoever takes too long."""
    for process in processes:
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    """A local TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
