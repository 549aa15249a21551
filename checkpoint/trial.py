"""Reads a stranger's files in a child process first, because they might hang, crash or fill memory.

A parser that hangs cannot be stopped inside a process, and one in native code may end it. So a
child reads the files first, within limits on processor time and memory, and is killed beyond them.
Its output is not shown; its verdict is one line. The child inherits no setting of Baton, and
therefore no secret.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.error_line import one_line
from protocol.errors import BatonError, ModelLoadError

WALL_LIMIT_S = 60.0
CPU_LIMIT_S = 10
MEMORY_LIMIT_BYTES = 4 << 30
_FAILED = 2
_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
"""Idle threads reserve address space, which counts as memory here."""

Step = tuple[Path, Callable[[], Any]]
"""The file that a step is about, and the step."""


@dataclass(frozen=True)
class Trial:
    """A running child; `finish` waits for it."""

    process: subprocess.Popen[str]
    folder: Path

    def finish(self, wall_limit_s: float = WALL_LIMIT_S) -> None:
        """Wait for the verdict. Raises ModelLoadError, one line that names a file."""
        with self.process as process:
            try:
                output, _ = process.communicate(timeout=wall_limit_s)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
        status = process.returncode
        if status == 0:
            return
        lines = output.splitlines() or [str(self.folder)]
        if status == _FAILED:
            raise ModelLoadError(lines[-1])
        raise ModelLoadError(f"{lines[-1]} {_ending(status)}")

    def cancel(self) -> None:
        """Kill the child if it runs."""
        if self.process.returncode is None:
            self.process.kill()
            with self.process:
                self.process.communicate()


def start_trial(module: str, folder: Path) -> Trial:
    """Run `module` with the folder as its argument; its `main` calls `run_steps`."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("BATON_", "HF_", "AWS_"))
    }
    paths = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(folder)],
        env={**environ, **_ONE_THREAD, "PYTHONPATH": paths},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        errors="replace",
    )
    return Trial(process, folder)


def _ending(status: int) -> str:
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"takes more than {CPU_LIMIT_S} s to read"
    if status == -signal.SIGABRT:
        return f"cannot be read, perhaps for lack of memory (the limit is {MEMORY_LIMIT_BYTES} B)"
    return f"cannot be read: the attempt ended with status {status}"


# -- in the child ---------------------------------------------------------------------------


def limit_this_process() -> None:
    """Limit this process's processor time and memory. A trial's child calls this first."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # a system without this limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))


def run_steps(*steps: Step) -> int:
    """Run the steps in order, printing the file that each reads; returns the exit status."""
    for path, step in steps:
        print(path, flush=True)
        trouble = trouble_of(path, step)
        if trouble is not None:
            print(trouble, flush=True)
            return _FAILED
    return 0


def trouble_of(path: Path, step: Callable[[], Any]) -> str | None:
    """Why a step fails, in one line that names a file; None if it succeeds."""
    try:
        step()
    except BatonError as error:
        return one_line(error)
    except MemoryError:
        return f"{path} takes more memory to read than {MEMORY_LIMIT_BYTES} bytes"
    except RecursionError:
        return f"{path} is nested too deeply"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - panics in native code are not Exceptions
        return one_line(f"{path} cannot be read ({type(error).__name__}: {error})")
    return None
