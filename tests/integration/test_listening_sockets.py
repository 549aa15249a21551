"""A fleet on one host can be reached from that host only, also past sockets that ask for keys, and
not by another user of the host; one on two hosts only on the interface that the operator names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from bench.sockets import Seen, between_hosts, refused, strays
from bench.tools.listeners import listeners_of
from bench.tools.two_hosts import ADDRESSES, INTERFACE, TwoHosts
from cli.fleet import Fleet
from tests.integration.distant_hosts import forked_on_host, two_hosts
from tests.integration.fleets import complete, counters, running_fleet
from tests.integration.reference import DEMO_MODEL

AS_NOBODY = r"""
import json, os, socket, sys

os.setgroups([])
os.setgid(65534)
os.setuid(65534)
pids, sockets, began = json.loads(sys.argv[1])
read = []
for pid in pids:
    for name in ("mem", "environ", "maps", "fd", "map_files", "cwd"):
        try:
            path = f"/proc/{pid}/{name}"
            os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1)
            read.append(path)
        except OSError:
            pass
for each in os.scandir("/dev/shm"):
    try:
        if each.stat().st_ctime >= began and os.access(each.path, os.R_OK):
            read.append(each.path)
    except FileNotFoundError:
        pass
held, answers = [], []
for kind, address, port in sockets:
    target = "\0" + address[1:] if kind == "Unix" else (address, port)
    family = socket.AF_UNIX if kind == "Unix" else socket.AF_INET
    for number in range(40):
        one = socket.socket(family, socket.SOCK_STREAM)
        try:
            one.settimeout(0.2)
            one.connect(target)
            if number % 2:
                one.sendall(os.urandom(5000))
            held.append(one)
        except ConnectionRefusedError:  # a socket for datagrams
            one = socket.socket(family, socket.SOCK_DGRAM)
            one.setblocking(False)
            try:
                one.sendto(os.urandom(64), target)
            except BlockingIOError:
                break
        except OSError:
            continue  # it was cut off, or too many knock at once
print(json.dumps([read, len(held)]), flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    with running_fleet(
        prefill=1, decode=1, transport=request.param, local_prefill_threshold_tokens=0
    ) as fleet:
        yield fleet


def handoffs(fleet: Fleet) -> int:
    return counters(fleet, "decode-1")["handoffs"]


@pytest.mark.parametrize(
    ("fleet", "num_ports", "unix"),
    [("nixl", 3, ""), ("auto", 2, "@baton-kv-")],
    ids=["nixl", "shared memory"],
    indirect=["fleet"],
    scope="module",
)
def test_every_socket_of_a_fleet_listens_on_loopback(
    fleet: Fleet, num_ports: int, unix: str
) -> None:
    before = handoffs(fleet)
    complete(fleet, [7] * 40, max_tokens=2)
    assert handoffs(fleet) > before, "connections that are made later count"
    found = {name: listeners_of(child.pid) for name, child in fleet.processes.items()}
    assert strays(Seen(found, fleet.settings.transport, 0)) == []
    for name in ("prefill-1", "decode-1"):
        kinds = [each.kind for each in found[name]]
        assert kinds.count("TCP") == num_ports, "the control and event sockets, and UCX's"
        assert kinds.count("UDP") == 0
        assert all(unix in str(each) for each in found[name] if each.kind == "Unix")
        assert not unix or kinds.count("Unix") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    "fleet",
    ["auto", pytest.param("nixl", marks=pytest.mark.nightly)],
    ids=["shared memory", "nixl"],
    indirect=True,
    scope="module",
)
def test_another_user_of_the_host_reads_nothing_and_stops_nothing(fleet: Fleet) -> None:
    """At every socket and file of the fleet."""
    expected = complete(fleet, [7] * 40, max_tokens=2)["choices"][0]["token_ids"]
    before = handoffs(fleet)
    pids = [child.pid for child in fleet.processes.values()]
    sockets = [(each.kind, each.address, each.port) for pid in pids for each in listeners_of(pid)]
    began = min(psutil.Process(pid).create_time() for pid in pids)
    command = [sys.executable, "-c", AS_NOBODY, json.dumps([pids, sockets, began])]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as attacker:  # type: ignore[call-overload]
        read, num_held = json.loads(attacker.stdout.readline())
        for number in range(5):
            prompt = [8 + number] * 40
            assert complete(fleet, prompt, max_tokens=2)["choices"][0]["token_ids"]
        answer = complete(fleet, [7] * 40, max_tokens=2)
        attacker.communicate(timeout=60)
    assert read == []
    assert num_held > 0
    assert answer["choices"][0]["token_ids"] == expected
    assert handoffs(fleet) - before >= 5, "blocks move all the time"
    for name, child in fleet.processes.items():
        assert child.is_running(), f"{name} has ended"
        assert "Traceback" not in (fleet.log_dir / f"{name}.log").read_text(), name


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as made:
        yield made


def test_between_hosts_kv_blocks_move_on_the_named_interface_only(hosts: TwoHosts) -> None:
    seen = between_hosts(str(DEMO_MODEL), hosts, forked_on_host)
    assert seen.transport == "nixl"
    assert seen.cable_bytes > seen.bytes_moved > 0, "the blocks came over the cable"
    assert strays(seen, ADDRESSES) == []
    for name, address in zip(("decode-1", "prefill-1"), ADDRESSES, strict=True):
        reachable = [(each.kind, each.address) for each in seen.listeners[name]]
        assert reachable == [("TCP", address)] * 3, "control, events, and UCX"


@pytest.mark.nightly
def test_without_permission_for_tcp_a_worker_ends_with_one_line(hosts: TwoHosts) -> None:
    ended = refused(str(DEMO_MODEL), hosts, f"--kv-interface={INTERFACE}")
    assert ended.status == 2
    (line,) = ended.lines
    for word in ("TCP on eth0", "anyone who reaches", "--allow-kv-over-tcp"):
        assert word in line
