"""A server of one checkpoint in its own processes, started with the command that users run.

Owns the processes: `baton up` with its whole fleet, or a peer's server. All of them are stopped
(SIGSTOP) except within `awake`, so that they take no time from other contestants. A server is ready
when it answers a request for one token. Does not know what is measured.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil

from bench.engine.workloads import EngineNeeds
from bench.tools.processes import Processes, free_port
from process.cores import usable_cores
from process.version import baton_version
from protocol.errors import BatonError

HOST = "127.0.0.1"
BLOCK_SIZE = 16
VLLM_BLOCK_SIZE = 128
"""vLLM's default on a CPU."""
_START_S = 600.0
_AWAKE_S = 60.0
_STILL_S = 10.0
_POLL_S = 0.1
_PROMPTS_FIRST_MS = 1_000_000


@dataclass(frozen=True)
class ServerCommand:
    """The command that starts a server; its port is added."""

    name: str
    version: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def baton_command(needs: EngineNeeds) -> ServerCommand:
    """One decode worker that computes its own prefill, behind a router."""
    flags = (
        f"--model={needs.folder}",
        f"--served-model-name={needs.folder.name}",
        "--prefill=0",
        "--decode=1",
        "--device=cpu",
        f"--dtype={needs.dtype}",
        f"--torch-threads={needs.threads}",
        f"--block-size={BLOCK_SIZE}",
        f"--num-blocks={needs.num_tokens // BLOCK_SIZE + 1}",
        f"--max-batch-size={needs.max_sequences}",
        f"--chunk-max-tokens={needs.step_tokens}",
        f"--itl-target-ms={_PROMPTS_FIRST_MS}",
        f"--host={HOST}",
    )
    command = (sys.executable, "-m", "cli.main", "up", *flags)
    # Processes are stopped for minutes; the first to continue must not take the others for dead.
    patience = dict.fromkeys(("BATON_LEASE_S", "BATON_PEER_SILENCE_S"), "86400")
    return ServerCommand("baton", f"Baton {baton_version()}", command, patience)


def vllm_command(
    needs: EngineNeeds, python: str, caching: tuple[str, ...] = ("--no-enable-prefix-caching",)
) -> ServerCommand:
    """`vllm serve` of the interpreter's environment, without prefix caching unless `caching` has
    other flags.

    Raises BatonError if that interpreter has no vLLM.
    """
    flags = (
        str(needs.folder),
        f"--dtype={needs.dtype}",
        f"--served-model-name={needs.folder.name}",
        f"--max-model-len={needs.max_context}",
        f"--max-num-seqs={needs.max_sequences}",
        f"--max-num-batched-tokens={needs.step_tokens}",
        "--gpu-memory-utilization=0.3",  # of a CPU's memory, which other servers use, too
        *caching,
        f"--host={HOST}",
    )
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, usable_cores()[: needs.threads])),
        "VLLM_CPU_KVCACHE_SPACE": str(needs.kv_gib),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    version = f"vLLM {_package_version(python, 'vllm')}"
    command = (python, "-m", "vllm.entrypoints.cli.main", "serve", *flags)
    return ServerCommand("vllm", version, command, environment)


class Server:
    """A context manager that starts the server and leaves it stopped, except within `awake`.

    `model` is the model's name in requests. Raises BatonError with the end of the server's log if
    the server is not ready in time or ends.
    """

    def __init__(self, command: ServerCommand, needs: EngineNeeds) -> None:
        self.name = command.name
        self.version = command.version
        self.model = needs.folder.name
        self.port = free_port()
        self._command = [*command.command, f"--port={self.port}"]
        self._environment = command.environment
        self._processes = Processes(f"{command.name}-server")

    def __enter__(self) -> Server:
        self._processes.start(self.name, self._command, self._environment)
        try:
            self._wait_serving(_START_S)
            self._stand_still()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """A context in which the server runs and is ready."""
        self._signal(signal.SIGCONT)
        try:
            self._wait_serving(_AWAKE_S)
            yield
        finally:
            self._stand_still()

    def processes(self) -> list[psutil.Process]:
        """All running processes of the server, the leader first."""
        try:
            leader = psutil.Process(self._processes.pids[self.name])
            return [leader, *leader.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _wait_serving(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._answers():
            said = self._processes.log_tails
            if not self._processes.is_running(self.name):
                raise BatonError(f"{self.name} ended: {said()}")
            if time.monotonic() > deadline:
                raise BatonError(f"{self.name} did not serve in {timeout_s:g} s: {said()}")
            time.sleep(_POLL_S)

    def _answers(self) -> bool:
        body = {"model": self.model, "prompt": [3, 4, 5], "max_tokens": 1}
        request = urllib.request.Request(
            f"http://{HOST}:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=10):
                return True
        except OSError:
            return False

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes():
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue  # the process ended in the meantime

    def _stand_still(self) -> None:
        """Stop all processes and wait until they have stopped: a busy one stops a moment later."""
        self._signal(signal.SIGSTOP)
        deadline = time.monotonic() + _STILL_S
        while not all(map(_is_still, self.processes())):
            if time.monotonic() > deadline:
                raise BatonError(f"{self.name} did not stand still in {_STILL_S:g} s")
            time.sleep(_POLL_S / 10)

    def _end(self) -> None:
        processes = self.processes()
        self._signal(signal.SIGCONT)
        self._processes.close()
        _, alive = psutil.wait_procs(processes, timeout=5)
        for process in alive:
            process.kill()


def _is_still(process: psutil.Process) -> bool:
    try:
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _package_version(python: str, module: str) -> str:
    """The version of the package that has this module: `vllm` also comes as `vllm-cpu`."""
    probe = (
        "import importlib.metadata as m;"
        f" print(*(m.version(name) for name in m.packages_distributions()[{module!r}][:1]))"
    )
    done = subprocess.run([python, "-c", probe], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise BatonError(f"{python} has no {module}")
    return done.stdout.strip()
