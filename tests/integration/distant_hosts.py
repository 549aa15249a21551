"""Forked processes on the hosts of a `TwoHosts`."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from bench.tools import fleet_between_hosts
from bench.tools.fleet import OtherNode
from bench.tools.processes import Processes
from bench.tools.two_hosts import ADDRESSES, INTERFACE, TwoHosts
from tests.forked import fork_context, run_module
from tests.forks import ForkedProcess
from tests.integration.transport_workers import wait_until

WAIT_S = 120.0
_CLONE_NEWNS = 0x20000


def enter(namespace: str) -> None:
    """Move this process to a host, whose interfaces UCX finds in /sys."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        assert libc.setns(file.fileno(), 0) == 0
    assert libc.unshare(_CLONE_NEWNS) == 0
    for command in (["--make-rprivate", "/"], ["-t", "sysfs", "sysfs", "/sys"]):
        subprocess.run(["mount", *command], check=True)
    state = Path(f"/sys/class/net/{INTERFACE}/operstate")
    wait_until(lambda: state.read_text().strip() == "up", "interface that is up")


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Two hosts. Skips a test where there are no network namespaces, unless they are required."""
    if reason := TwoHosts.why_not():
        if os.environ.get("REQUIRE_NETWORK_NAMESPACES"):
            pytest.fail(f"network namespaces are required here: {reason}")
        pytest.skip(reason)
    with TwoHosts() as both:
        yield both
    assert not [each for each in both.namespaces if Path("/run/netns", each).exists()]


def node_in(namespace: str, role: str, flags: Sequence[str]) -> OtherNode:
    """The second host of a worker with these flags, which is this namespace."""
    own = ("--node-rank=1", f"--host={ADDRESSES[1]}")
    return OtherNode(role, (*flags, *own), ("ip", "netns", "exec", namespace))


Main = Callable[[list[str]], int]


def forked_on_host(
    hosts: TwoHosts, arguments: Sequence[str], main: Main = fleet_between_hosts.main
) -> str:
    """What `main` prints on the first host, whose BenchFleets fork their processes."""
    ours, theirs = fork_context().Pipe(duplex=False)
    parts = (hosts.namespaces[0], main, arguments, theirs)
    process = fork_context().Process(target=_run, args=parts)
    process.start()
    theirs.close()
    with open(os.dup(ours.fileno())) as output:
        printed = output.read()
    ours.close()
    process.join(WAIT_S)
    assert process.exitcode == 0, printed
    return printed


def _run(namespace: str, main: Main, arguments: Sequence[str], output: Connection) -> None:
    for each in (1, 2):
        os.dup2(output.fileno(), each)
    enter(namespace)
    os.environ["UCX_TLS"] = "tcp"
    fleet_between_hosts.BenchFleet.make_processes = _ForkedProcesses  # type: ignore[method-assign]
    sys.exit(main(list(arguments)))


class _ForkedProcesses(Processes):
    """Runs `[ip netns exec HOST] python -m MODULE ...` in forked processes."""

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        module, *arguments = command[command.index("-m") + 1 :]
        host = command[command.index("exec") + 1] if "netns" in command else None
        log = str(self.folder / f"{name}.log")
        env = {**os.environ, **environment}
        life = partial(self._live, host, module, arguments, env, log)
        self._lives[name] = ForkedProcess(life)  # type: ignore[assignment]

    def _live(
        self,
        host: str | None,
        module: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        log: str,
    ) -> int:
        self._folder._finalizer.detach()  # type: ignore[attr-defined]  # the folder is the parent's
        if host is not None:
            enter(host)
        run_module(module, arguments, env, log)
