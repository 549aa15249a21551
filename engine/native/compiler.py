"""A C++ compiler of this machine: found, run on several files at once, ended when interrupted.

Knows neither flags nor instruction sets. `KernelsUnavailable` tells the operator what went wrong.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from engine.cpu_quota import threads_within_quota

_TIMEOUT_S = 600.0  # for one compiler run; others may run at the same time
_LOOK_S = 0.2


class KernelsUnavailable(Exception):
    """The kernels are not available on this machine; the message tells the operator why."""


def find_compiler() -> str:
    """The compiler's path. Raises KernelsUnavailable."""
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found is not None:
            return found
    raise KernelsUnavailable("there is no C++ compiler (c++, g++ or clang++, or CXX)")


def compile_objects(command: list[str], sources: Sequence[Path], folder: Path) -> list[str]:
    """Compile `sources` to objects in `folder`. If this thread is interrupted, so are the
    compilers. Raises KernelsUnavailable."""
    cores = range(os.cpu_count() or 1)
    running = _Commands()

    def compile_one(source: Path) -> str:
        target = str(folder / f"{source.stem}.o")
        run([*command, "-c", str(source), "-o", target], running)
        return target

    num_threads = threads_within_quota(len(cores))
    with ThreadPoolExecutor(num_threads, initializer=_use, initargs=(cores,)) as threads:
        try:
            compiled = [threads.submit(compile_one, source) for source in sources]
            while wait(compiled, _LOOK_S).not_done:
                pass  # a signal that comes just before a wait does not end this wait
            return [each.result() for each in compiled]
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            running.kill()
            raise


def _use(cores: range) -> None:
    """Pin this thread and its children to those of `cores` that the process may use, even if it was
    pinned to fewer: nothing else computes until the kernels are built."""
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)


class _Commands:
    """Commands that run in several threads and can all be ended at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._is_killed = False

    def add(self, process: subprocess.Popen[str]) -> None:
        """Note a command that has started. End it if `kill` was called before."""
        with self._lock:
            self._running.add(process)
        if self._is_killed:
            _kill(process)

    def remove(self, process: subprocess.Popen[str]) -> None:
        """Forget a command that has ended."""
        with self._lock:
            self._running.discard(process)

    def kill(self) -> None:
        """End all commands, also those that are about to start."""
        self._is_killed = True
        with self._lock:
            for each in self._running:
                _kill(each)


def _kill(process: subprocess.Popen[str]) -> None:
    """End a command and the processes that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run(command: list[str], running: _Commands | None = None) -> str:
    """Run `command` and return its standard output; meanwhile its process is in `running`. Raises
    KernelsUnavailable, with the command's standard error, if it fails."""
    running = _Commands() if running is None else running
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a group of its own, because compilers start processes
        )
    except OSError as error:
        raise KernelsUnavailable(f"{command[0]}: {error}") from error
    running.add(process)
    try:
        output, errors = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise KernelsUnavailable(f"{command[0]}: {error}") from error
    finally:
        if process.poll() is None:
            _kill(process)
            process.communicate()
        running.remove(process)
    if process.returncode != 0:
        raise KernelsUnavailable(f"{command[0]} failed: {errors.strip()[-500:]}")
    return output
