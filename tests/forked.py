"""Processes of Baton that start in a fraction of a second: forked from a server that has imported
everything they need, but started no thread, no NIXL agent and no ZeroMQ context.

A process started the usual way takes two seconds to import torch. The server is one for each
pytest process and ends with it, however it ends; then the processes that it has forked end, too.
Forked processes do not try the bundled model in a child first, nor the checkpoint that
KNOWN_CHECKPOINT names: they are no stranger's. Tests of `baton up`, and of hostile checkpoints,
start real processes, which do.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import _forkserver  # type: ignore[attr-defined]
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from checkpoint.trial import Trial, start_trial
from cli.child import Child
from cli.child_settings import ChildSettings
from process.bound_command import bind_to
from protocol.messages import Role
from tests.forked_hands import ForkedHands, num_hands
from tests.forks import ForkedProcess
from tests.paths import DEMO_MODEL, ROOT

PRELOADED = [
    "cli.commands",
    "decode_worker.main",
    "engine.loader",
    "prefill_worker.main",
    "router_process.main",
    "worker.assembly",
    "tests.faults.faulty_worker",
    "tests.forked",
    "tests.integration.transport_workers",
    "pydantic.v1",  # FastAPI imports it while a router starts
    "tests.frozen",  # the last
]
KNOWN_CHECKPOINT = "TESTS_KNOWN_CHECKPOINT"
"""An environment variable of forked processes."""
_SERVER_ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "GOMP_SPINCOUNT": "2000",  # as `baton` sets it before torch is imported
    "OPENBLAS_NUM_THREADS": "1",  # numpy would start threads at its import
}


@functools.cache
def fork_context() -> ForkServerContext:
    """The context that makes forked processes. The first call starts the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    before = {name: os.environ.get(name) for name in _SERVER_ENVIRONMENT}
    os.environ.update(_SERVER_ENVIRONMENT)
    try:
        process = context.Process(target=_assert_fit_for_forks)
        process.start()
        process.join()
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
    assert process.exitcode == 0, "the fork server has threads, or lacks a module"
    return context


def _assert_fit_for_forks() -> None:
    threads = os.listdir(f"/proc/{os.getppid()}/task") if sys.platform == "linux" else ["main"]
    assert len(threads) == 1, threads
    assert set(PRELOADED) <= set(sys.modules), "a module was not imported"


class ForkedChild(Child):
    """A child whose command is `python -m MODULE ARGUMENTS`, forked instead of started."""

    def start(self) -> None:
        """Start it, or start it again after it ended."""
        assert self._process is None or self.exit_status() is not None, "still running"
        self.log_path.touch()
        module = self._command.index("-m") + 1
        process = fork_context().Process(
            target=run_module,
            args=(
                self._command[module],
                self._command[module + 1 :],
                self._env,
                str(self.log_path),
            ),
            daemon=True,
        )
        process.start()
        self._process = _ForkedPopen(process)  # type: ignore[assignment]
        self.num_starts += 1


class ForkedChildren(ChildSettings):
    """Makes the children of a fleet of tests; `module` runs workers in place of `cli.main`."""

    kind: type[ForkedChild] = ForkedChild

    def __init__(self, *arguments: Any, module: str | None = None, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._module = module

    def _child(
        self, role: Role, name: str, own: dict[str, Any], secrets: dict[str, str], log_dir: Path
    ) -> Child:
        real = super()._child(role, name, own, secrets, log_dir)
        command = list(real._command)
        if self._module is not None and role is not Role.ROUTER:
            command[command.index("-m") + 1] = self._module
        return self.kind(name, role, command, real._env, real.log_path)


class ChildOfForked(ForkedChild):
    """A child of a process that was forked itself, and so has no server for more."""

    def start(self) -> None:
        """Start it, or start it again after it ended."""
        assert self._process is None or self.exit_status() is not None, "still running"
        self.log_path.touch()
        module, *arguments = self._command[self._command.index("-m") + 1 :]
        life = partial(run_module, module, arguments, self._env, str(self.log_path))
        self._process = ForkedProcess(life)  # type: ignore[assignment]
        self.num_starts += 1


class _ForkedPopen:
    """What `Child` uses of `subprocess.Popen`."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        assert process.pid is not None
        self.pid = process.pid

    def poll(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """Wait for its end, and return its exit status. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(str(self._process.name), timeout)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal; does nothing if the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def run_module(
    module: str, arguments: Sequence[str], env: Mapping[str, str], log_path: str
) -> NoReturn:
    """Run `python -m module arguments` in a forked process, with its output in a file. The process
    ends when its parent has ended."""
    _leave_server()
    os.setsid()
    _redirect(log_path)
    os.environ.clear()
    os.environ.update(env)
    parent = f"--parent-pid={os.getppid()}"
    own = [parent if each.startswith("--parent-pid=") else each for each in arguments]
    sys.argv = [module, *own]
    for each in ("router_process.main", "worker.assembly"):
        sys.modules[each].start_trial = _trial_of  # type: ignore[attr-defined]
    if number := num_hands(own):
        sys.modules["worker.ranks.processes"].start_hand = ForkedHands(number).start  # type: ignore[attr-defined]
    status = importlib.import_module(module).main(own)
    atexit._run_exitfuncs()
    sys.exit(status)


def run_up(arguments: Sequence[str], env: Mapping[str, str], output: Connection) -> NoReturn:
    """Run `baton up` in a forked process, which forks its children and writes to `output`."""
    _leave_server()
    bind_to(os.getppid(), signal.SIGKILL)
    for each in (1, 2):
        os.dup2(output.fileno(), each)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    for each in ("cli.fleet", "cli.up"):
        importlib.import_module(each).ChildSettings = _ChildrenOfForked  # type: ignore[attr-defined]
    sys.exit(importlib.import_module("cli.up").main(arguments))


def _leave_server() -> None:
    """Let the fork server end while this process runs: it waits until its pytest process, and each
    forked process, has closed a pipe."""
    if _forkserver._forkserver_alive_fd is not None:
        os.close(_forkserver._forkserver_alive_fd)
        _forkserver._forkserver_alive_fd = None


class _ChildrenOfForked(ForkedChildren):
    kind = ChildOfForked


def _trial_of(module: str, folder: Path) -> Trial | _PassedTrial:
    is_known = folder == DEMO_MODEL or str(folder) == os.environ.get(KNOWN_CHECKPOINT)
    return _PassedTrial() if is_known else start_trial(module, folder)


class _PassedTrial:
    """The trial of a checkpoint that is known to be good."""

    def finish(self) -> None:
        """Does nothing, because there is nothing to wait for."""

    def cancel(self) -> None:
        """Does nothing, because there is nothing to kill."""


def _redirect(log_path: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
