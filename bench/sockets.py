"""The listening sockets of whole fleets, as a table.

    python -m bench.sockets [--model demo_model]

Starts `baton up`, `baton up --transport nixl`, and, where network namespaces can be made (root, and
`ip`), workers on two hosts with KV blocks over TCP refused and allowed. Each fleet serves a request
whose blocks move from one worker to the other before its sockets are listed. Exits with 1 if a
fleet of one host can be reached from another, or one of two hosts by another interface than that
for KV blocks.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
from rich.console import Console
from rich.table import Table

from bench.tools.fleet_between_hosts import SMALL, complete
from bench.tools.listeners import Listener, listeners_of
from bench.tools.paths import DEMO_MODEL
from bench.tools.two_hosts import ADDRESSES, INTERFACE, TwoHosts
from protocol.errors import BatonError

_START_S = 120.0
_END_S = 60.0
_LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d ")
_UP = ("--port=0", "--local-prefill-threshold-tokens=0", "--no-pin")


@dataclass(frozen=True)
class Seen:
    """A fleet that served a request: its sockets by process, and how its blocks moved.

    `cable_bytes` came to the decode worker's host over the cable between two hosts.
    """

    listeners: Mapping[str, list[Listener]]
    transport: str
    bytes_moved: int
    cable_bytes: int = 0


@dataclass(frozen=True)
class Refused:
    """A worker that did not start."""

    status: int
    lines: list[str]  # on stderr, without its log


def of_one_host(model: str, *flags: str) -> Seen:
    """The sockets of `baton up` with these flags. Raises BatonError if it does not start."""
    with _baton_up(model, *flags) as (process, url):
        moved = complete(url, _model_name(url))["attempts"][-1]["prefill"]
        children = psutil.Process(process.pid).children(recursive=True)
        listeners = {_name_of(each): listeners_of(each.pid) for each in children}
        return Seen(listeners, moved["transport"], moved["bytes_moved"])


def run_on_host(hosts: TwoHosts, arguments: Sequence[str]) -> str:
    """The output of `bench.tools.fleet_between_hosts` on the first host. Raises BatonError.

    UCX would find out that both hosts are one machine, and copy between the processes, so it gets
    TCP alone.
    """
    program = (sys.executable, "-m", "bench.tools.fleet_between_hosts", *arguments)
    done = subprocess.run(
        hosts.command(0, *program),
        env={**os.environ, "UCX_TLS": "tcp"},
        capture_output=True,
        text=True,
        timeout=_START_S,
        check=False,
    )
    if done.returncode != 0:
        raise BatonError(f"the fleet between hosts failed:\n{done.stderr[-2000:]}")
    return done.stdout


def between_hosts(
    model: str, hosts: TwoHosts, run: Callable[[TwoHosts, Sequence[str]], str] = run_on_host
) -> Seen:
    """The sockets of workers on two hosts, with KV blocks over TCP allowed. Raises BatonError."""
    flags = (f"--kv-interface={INTERFACE}", "--allow-kv-over-tcp")
    before = hosts.received_bytes(0)
    printed = run(hosts, [hosts.namespaces[1], model, *flags])
    shown = json.loads(printed.splitlines()[-1])
    listeners = {
        name: [Listener(*each) for each in found] for name, found in shown["listeners"].items()
    }
    cable_bytes = hosts.received_bytes(0) - before
    return Seen(listeners, shown["transport"], shown["bytes_moved"], cable_bytes)


def refused(model: str, hosts: TwoHosts, *flags: str) -> Refused:
    """How a worker ends that may not move KV blocks over TCP, on an address of two hosts."""
    worker = (sys.executable, "-m", "cli.main", "decode", f"--host={ADDRESSES[0]}", *SMALL, *flags)
    known = {"BATON_CLUSTER_SECRET": "0" * 32, "BATON_REDIS_URL": f"redis://{ADDRESSES[0]}:6379"}
    done = subprocess.run(
        hosts.command(0, *worker, f"--model={model}"),
        env={**os.environ, **known},
        capture_output=True,
        text=True,
        timeout=_START_S,
        check=False,
    )
    lines = [line for line in done.stderr.splitlines() if not _LOG_LINE.match(line)]
    return Refused(done.returncode, lines)


@contextmanager
def _baton_up(model: str, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A `baton up` that serves, and its URL. Raises BatonError."""
    command = [sys.executable, "-m", "cli.main", "up", f"--model={model}", *SMALL, *_UP, *flags]
    with tempfile.TemporaryDirectory(prefix="baton-sockets-") as folder:
        logs = f"--log-dir={folder}"
        with subprocess.Popen(
            [*command, logs], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                yield process, _url_of(process)
            finally:
                process.terminate()
                process.wait(_END_S)


def _url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    printed, url = [], ""
    for line in process.stdout:
        printed.append(line)
        if line.startswith("router"):
            url = line.split()[1].removesuffix("/v1")
        if line.startswith("Ctrl-C"):
            return url
    raise BatonError(f"baton up did not start:\n{''.join(printed)}")


def _model_name(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
        name: str = json.load(answer)["data"][0]["id"]
        return name


def _name_of(process: psutil.Process) -> str:
    arguments = process.cmdline()
    names = [each.partition("=")[2] for each in arguments if each.startswith("--worker-id=")]
    if names:
        return names[0]
    return "router" if "router" in arguments else "store"


def strays(seen: Seen, addresses: tuple[str, ...] = ()) -> list[str]:
    """Sockets on other addresses than loopback ones and `addresses`, with their process."""
    return [
        f"{name}: {each}"
        for name, found in seen.listeners.items()
        for each in found
        if each.kind != "Unix"
        and each.address not in addresses
        and not ipaddress.ip_address(each.address).is_loopback
    ]


class Report:
    """The table of all fleets, and what is wrong with them."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self._table = Table(title="listening sockets")
        for name in ("fleet", "KV blocks over", "process", "sockets"):
            self._table.add_column(name, overflow="fold")

    def add(self, title: str, seen: Seen, addresses: tuple[str, ...] = ()) -> None:
        """One fleet, whose sockets may be on loopback and `addresses`."""
        first = (title, seen.transport)
        for name, found in sorted(seen.listeners.items()):
            self._table.add_row(*first, name, "\n".join(map(str, found)) or "none")
            first = ("", "")
        self._table.add_section()
        self.failures += strays(seen, addresses)

    def add_refused(self, title: str, ended: Refused) -> None:
        """One worker that must not start."""
        lines = "\n".join(ended.lines)
        self._table.add_row(title, "-", "decode", f"ends with status {ended.status}: {lines}")
        self._table.add_section()
        if ended.status != 2 or len(ended.lines) != 1:
            self.failures.append(f"{title}: {ended}")

    def print(self, console: Console) -> None:
        """The table and what is wrong."""
        console.print(self._table)
        for failure in self.failures:
            console.print(f"failed: {failure}", markup=False)


def main(argv: list[str]) -> int:
    """Run and print the table; 0 if every socket is where it should be."""
    parser = argparse.ArgumentParser(prog="python -m bench.sockets", description=__doc__)
    parser.add_argument("--model", default=str(DEMO_MODEL))
    model = parser.parse_args(argv).model
    console, report = Console(soft_wrap=True), Report()
    report.add("baton up", of_one_host(model))
    report.add("baton up --transport nixl", of_one_host(model, "--transport=nixl"))
    if reason := TwoHosts.why_not():
        console.print(f"without two hosts: {reason}")
    else:
        with TwoHosts() as hosts:
            kv_port = f"--kv-interface={INTERFACE}"
            report.add_refused("two hosts, no interface named", refused(model, hosts))
            report.add_refused("two hosts, TCP refused", refused(model, hosts, kv_port))
            report.add("two hosts, TCP allowed", between_hosts(model, hosts), ADDRESSES)
    report.print(console)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
