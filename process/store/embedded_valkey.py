"""The Valkey that Baton starts itself if none is configured: in memory, local, with a password.

Owns the process and its log, an unnamed temporary file unless the log is forwarded: no data is left
on disk in any case. On Linux the server also ends when the thread that called `start` ends, however
its process ends.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

import redis
from redis.exceptions import AuthenticationError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from process.line_pump import LinePump, pump_output
from process.store.registry import connection_options
from process.store.valkey_binary import INSTEAD, NO_FOLDER, find_binary
from process.temporary_files import temporary_file
from protocol.errors import ConfigError

log = logging.getLogger(__name__)

_POLL_S = 0.01
_STOP_WAIT_S = 5.0
_TETHER = Path(__file__).parents[1] / "bound_command.py"
_ATTEMPTS = 5


class EmbeddedValkey:
    """One Valkey on a free port of this host; a context manager."""

    def __init__(self, start_timeout_s: float = 60.0, host: str = "127.0.0.1") -> None:
        """The server listens on the address `host` only."""
        self._host = host
        self._start_timeout_s = start_timeout_s
        self._password = secrets.token_urlsafe(24)
        self._log: IO[bytes] | None = None
        self._take: Callable[[str], None] | None = None
        self._pump: LinePump | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """`redis://:password@host:port`; pass it on by environment, never by flag."""
        assert self._process is not None, "not started"
        return f"redis://:{self._password}@{self._host}:{self._port}"

    @property
    def pid(self) -> int:
        """The pid of the server's process."""
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def port(self) -> int:
        """The server's port."""
        return self._port

    def exit_status(self) -> int | None:
        """The server's exit status; None while it runs."""
        return None if self._process is None else self._process.poll()

    def forward_to(self, take: Callable[[str], None]) -> None:
        """From the next start on, pass each line of output to `take`, from another thread, instead
        of writing a log."""
        self._take = take

    def log_tail(self, num_lines: int = 10) -> str:
        """The last lines of the server's log."""
        if self._pump is not None:
            return "\n".join(self._pump.tail(num_lines))
        assert self._log is not None, "not started"
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), size, 0).decode(errors="replace")
        return "\n".join(text.splitlines()[-num_lines:])

    def start(self) -> EmbeddedValkey:
        """Start the server and wait until it answers. Raises ConfigError."""
        assert self._process is None, "started before"
        binary = find_binary()
        self._log = temporary_file() if self._take is None else None
        deadline = time.monotonic() + self._start_timeout_s
        try:
            for _ in range(_ATTEMPTS):
                self._port = _free_port(self._host)
                self._process = self._spawn(binary)
                if self._answers(deadline):
                    return self
                if time.monotonic() >= deadline:
                    break
                self._end_process()  # most likely the port was taken in the meantime: try another
            raise ConfigError(f"the embedded Valkey did not start; {INSTEAD}:\n{self.log_tail()}")
        except BaseException:
            self.stop()
            raise

    def restart(self) -> None:
        """Restart the server, empty, at the same URL, after it ended. Raises ConfigError, and may
        then be called again."""
        former = self._process
        self._end_process()
        try:
            self._process = self._spawn(find_binary())
        except ConfigError:
            self._process = former
            raise
        if not self._answers(time.monotonic() + self._start_timeout_s):
            raise ConfigError(f"the embedded Valkey did not restart:\n{self.log_tail()}")

    def stop(self) -> None:
        """Stop the server. May be called twice."""
        self._end_process()
        if self._log is not None:
            self._log.close()
            self._log = None

    def __enter__(self) -> EmbeddedValkey:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _spawn(self, binary: Path) -> subprocess.Popen[bytes]:
        """Start the server; its configuration is on stdin, so that no argument has the password.
        Raises ConfigError."""
        settings = (
            f"bind {self._host}\nport {self._port}\nrequirepass {self._password}\n"
            'save ""\nappendonly no\ndaemonize no\n'
            "repl-diskless-load swapdb\n"  # a replica of another server needs no file
            f"dbfilename {secrets.token_hex(16)}.rdb\n"  # else it would load a /dump.rdb on macOS
        )
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_TETHER), str(os.getpid()), str(binary), "-"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if self._take is not None else self._log,
                stderr=subprocess.STDOUT,
                cwd=NO_FOLDER,
                start_new_session=True,
            )
            if self._take is not None:
                self._pump = pump_output(process, self._take)
        except OSError as error:
            raise ConfigError(f"the embedded Valkey cannot be started: {error}") from error
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:  # it ended at once, which `_answers` sees
            process.stdin.write(settings.encode())
        return process

    def _answers(self, deadline: float) -> bool:
        """Wait for an answer to our password; False if the process ended or time is up."""
        assert self._process is not None
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                return False
            try:
                with redis.Redis.from_url(self.url, **connection_options(1.0)) as client:
                    client.ping()
                return True
            except (AuthenticationError, ResponseError):
                return False  # another server: the port was taken
            except (RedisConnectionError, RedisTimeoutError):
                time.sleep(_POLL_S)
        return False

    def _end_process(self) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_WAIT_S)
            except subprocess.TimeoutExpired:
                log.warning("the embedded Valkey did not stop in time and is killed")
                self._process.kill()
        self._process.wait()
        self._process = None


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
