"""Processes of a benchmark by name: started, signalled, ended in order; each writes a log.

Owns them and the folder of their logs, which `close` removes. If the benchmark is killed, a process
of its own kills them (`left_processes.py`). Does not know what they do.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

_END_S = 30.0
_TAIL_CHARS = 800
_WATCH = Path(__file__).with_name("left_processes.py")


class Processes:
    """The processes of one benchmark. Starting a name again replaces its ended process."""

    def __init__(self, purpose: str) -> None:
        """`purpose` becomes part of the folder's name."""
        self._folder = tempfile.TemporaryDirectory(prefix=f"baton-{purpose}-")
        self._lives: dict[str, subprocess.Popen[bytes]] = {}
        self._watch: subprocess.Popen[bytes] | None = None

    @property
    def folder(self) -> Path:
        """The folder of the logs; processes may write their own files there."""
        return Path(self._folder.name)

    @property
    def pids(self) -> dict[str, int]:
        """Pids of the current processes, in the order in which the names were first started."""
        return {name: life.pid for name, life in self._lives.items()}

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start or restart a process; `environment` is added to ours."""
        with open(self.folder / f"{name}.log", "ab") as log_file:
            self._lives[name] = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._kill_if_left(self._lives[name].pid)

    def _kill_if_left(self, pid: int) -> None:
        """Have the process killed, with its descendants, if this one ends without `close`."""
        if self._watch is None:
            command = [sys.executable, "-I", str(_WATCH)]
            self._watch = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
            )
        assert self._watch.stdin is not None
        self._watch.stdin.write(b"%d\n" % pid)
        self._watch.stdin.flush()

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal if the process runs."""
        self._lives[name].send_signal(number)

    def wait_end(self, name: str, timeout_s: float) -> int:
        """Wait for the process to end; returns its exit status. Raises TimeoutExpired."""
        return self._lives[name].wait(timeout_s)

    def is_running(self, name: str) -> bool:
        """Whether the process has not ended; a stopped process counts as running."""
        return self._lives[name].poll() is None

    def forget(self, name: str) -> None:
        """Drop a process that has ended."""
        del self._lives[name]

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
        """End all running processes. May be called twice."""
        self.end(self._lives)
        if self._watch is not None:
            self._watch.communicate(timeout=_END_S)
            self._watch = None
        self._folder.cleanup()


def end_processes(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask all processes to stop, including stopped ones, and kill those that take too long."""
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
    """A local TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
