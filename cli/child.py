"""One child process: its command, its log, its start and its end.

Owns the process and knows nothing of its work. A child has its own session, so that a Ctrl-C at
the terminal reaches only the parent. The child gets the parent's pid and ends when the parent is
gone.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import IO

import cli
from process.line_pump import LinePump, pump_output
from protocol.errors import ServiceError

log = logging.getLogger(__name__)

_LAST_LINES_S = 5.0
_TAIL_BYTES = 1 << 16
"""How much of the end of a log is read for its last lines."""


class Child:
    """A named process that can be restarted. `log_path` collects the output of all its runs."""

    def __init__(
        self, name: str, role: str, command: Sequence[str], env: Mapping[str, str], log_path: Path
    ) -> None:
        self.name = name
        self.role = role
        self.log_path = log_path
        self.num_starts = 0
        self._command = list(command)
        self._env = dict(env)
        self._process: subprocess.Popen[bytes] | None = None
        self._read_to = 0
        self._take: Callable[[str, str], None] | None = None
        self._pump: LinePump | None = None

    @property
    def pid(self) -> int:
        """The pid of the present run."""
        assert self._process is not None, "not started"
        return self._process.pid

    def forward_to(self, take: Callable[[str, str], None]) -> None:
        """From the next start on, pass each line of output to `take(name, line)`, from another
        thread, instead of writing a log."""
        self._take = take

    def add_flags(self, *flags: str) -> None:
        """From the next start on, give the process these flags, too; they override earlier ones."""
        self._command += flags

    def start(self) -> None:
        """Start the process, or restart it after it ended. Raises ServiceError; a restart may then
        be tried again."""
        assert self._process is None or self.exit_status() is not None, "still running"
        try:
            with self._output() as output:
                process = subprocess.Popen(
                    self._command,
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            if self._take is not None:
                self._pump = pump_output(process, partial(self._take, self.name))
        except OSError as error:
            raise ServiceError(f"{self.name} cannot be started: {error}") from error
        self._process = process
        self.num_starts += 1

    def _output(self) -> AbstractContextManager[IO[bytes] | int]:
        """Where the process writes: a pipe to us, or its log, whose folder is made again if it is
        gone. A restarted process without a log runs nevertheless. Raises OSError at the first
        start."""
        if self._take is not None:
            return nullcontext(subprocess.PIPE)
        try:
            self.log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            return open(self.log_path, "ab")
        except OSError as error:
            if not self.num_starts:
                raise
            log.warning("%s runs without a log: %s", self.name, error)
            return nullcontext(subprocess.DEVNULL)

    def exit_status(self) -> int | None:
        """None while the process runs or before it started; negative: the signal that ended it."""
        return None if self._process is None else self._process.poll()

    def is_running(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal if the process runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the process to end; returns whether it has ended. If so, its
        last lines were passed on, too."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        if self._pump is not None:
            self._pump.join(_LAST_LINES_S)
        return True

    def ending(self) -> str:
        """How the process ended, in words."""
        status = self.exit_status()
        if status is not None and status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def new_lines(self) -> list[str]:
        """Complete lines that the process wrote to its log since the last call."""
        if self._take is not None:
            return []
        text = self._logged(self._read_to)
        complete = text[: text.rfind(b"\n") + 1]
        self._read_to += len(complete)
        return complete.decode(errors="replace").splitlines()

    def log_tail(self, num_lines: int = 12) -> str:
        """The last lines of the log; none if the log is gone."""
        if self._pump is not None:
            if not self.is_running():
                self._pump.join(_LAST_LINES_S)
            return "\n".join(self._pump.tail(num_lines))
        lines = self._logged(-_TAIL_BYTES).decode(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    def _logged(self, first: int) -> bytes:
        """The log from a byte on, counted from the end if negative; empty if the log is gone."""
        try:
            with open(self.log_path, "rb") as log_file:
                end = log_file.seek(0, os.SEEK_END)
                log_file.seek(max(0, end + first) if first < 0 else first)
                return log_file.read()
        except OSError:
            return b""


def baton_command(*arguments: str) -> list[str]:
    """The command line of a Baton process; `-P` keeps the current folder off the import path."""
    return [sys.executable, "-P", "-m", "cli.main", *arguments]


def baton_environment(env: Mapping[str, str]) -> dict[str, str]:
    """`env` with the folder of Baton's packages first in PYTHONPATH, as `baton_command` needs."""
    root = Path(cli.__file__).resolve().parent.parent
    paths = [str(root), *filter(None, [env.get("PYTHONPATH")])]
    return {**env, "PYTHONPATH": os.pathsep.join(paths)}
