"""Runs one part of a benchmark in its own process.

A failure on a card may be permanent: after an illegal access every later call of the process fails,
too, and a hanging kernel cannot be ended from within. With its own process a failing part affects
no other part, and its memory is free again when the next part begins. Standard error goes to a log,
whose end says why a process died.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_TAIL_LINES = 12
_TAIL_CHARS = 1500


def run_apart(command: Sequence[str], log: Path, limit_s: float) -> str:
    """Run a command to its end, or end it and its children after `limit_s`.

    Returns "" if it exited with status 0, else the failure and the end of its standard error.
    """
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=stderr, start_new_session=True
        )
        try:
            status = process.wait(limit_s)
            happened = f"exited with status {status}" if status > 0 else _died_of(-status)
        except subprocess.TimeoutExpired:
            happened = f"did not end itself and was killed after {limit_s:g} s"
        finally:
            _kill_group(process)
    return f"{happened}: {tail_of(log)}" if process.returncode else ""


def tail_of(log: Path) -> str:
    """The last lines of the log; empty if there are none."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-_TAIL_LINES:])[-_TAIL_CHARS:]


def _died_of(number: int) -> str:
    return f"died of {signal.Signals(number).name}" if number else ""


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its children, such as compilers, which outlive their parent."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
