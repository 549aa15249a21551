"""`baton preflight` on the hosts of one worker names each way of each rank, and whether it is open.

The hosts are network namespaces, each in a thread.
"""

from __future__ import annotations

import ctypes
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple, TypeVar

import pytest

from bench.tools.two_hosts import ADDRESSES, INTERFACE, TwoHosts
from cli.pods.preflight import rank_ways
from cli.pods.preflight.findings import Finding
from cli.pods.preflight.rank_ways import check_ranks
from cli.pods.preflight.settings import PreflightSettings
from process.store.embedded_valkey import EmbeddedValkey
from tests.integration.distant_hosts import two_hosts

T = TypeVar("T")
OF_RANKS = ("10.213.8.1", "10.213.8.2")
"""Second addresses of the hosts; the store is at the first ones."""
_CLONE_NEWNET = 0x40000000


class Hosts(NamedTuple):
    """Two hosts and the settings of a check on the first."""

    both: TwoHosts
    settings: PreflightSettings

    def threads(self, host: int) -> ThreadPoolExecutor:
        """One thread on a host; threads that it starts are there, too."""

        def enter() -> None:
            with open(f"/run/netns/{self.both.namespaces[host]}") as file:
                assert ctypes.CDLL(None).setns(file.fileno(), _CLONE_NEWNET) == 0

        return ThreadPoolExecutor(1, initializer=enter)

    def run(self, host: int, function: Callable[[], T]) -> Future[T]:
        """Call a function in a new thread on a host."""
        thread = self.threads(host)
        future = thread.submit(function)
        thread.shutdown(wait=False)
        return future

    def check(self, second_tp: int = 2, **changes: object) -> list[dict[str, Finding]]:
        """The findings of each host by name, with changed settings; the second host has its own
        `tensor_parallel`."""
        both = [
            replace(self.settings, preflight_index=each, host=OF_RANKS[each], **changes)
            for each in (0, 1)
        ]
        both[1] = replace(both[1], tensor_parallel=second_tp) if second_tp != 2 else both[1]
        waits = [self.run(each, lambda it=it: check_ranks(it)) for each, it in enumerate(both)]
        return [{each.name: each for each in wait.result()} for wait in waits]


@pytest.fixture(scope="module")
def started() -> Iterator[Hosts]:
    with two_hosts() as both:
        for name, address in zip(both.namespaces, OF_RANKS, strict=True):
            command = ["ip", "-n", name, "address", "add", f"{address}/24", "dev", INTERFACE]
            subprocess.run(command, check=True)
        valkey = EmbeddedValkey(host=ADDRESSES[0])
        settings = PreflightSettings(
            redis_url="",
            cluster_secret="a-secret-of-this-cluster",
            preflight_run="run",
            tensor_parallel=2,
            pipeline_parallel=2,
            nnodes=2,
            master_addr=OF_RANKS[0],
            wait_s=60.0,
        )
        hosts = Hosts(both, settings)
        with hosts.threads(0) as thread:  # Valkey ends with it
            thread.submit(valkey.start).result()
            try:
                yield hosts._replace(settings=replace(settings, redis_url=valkey.url))
            finally:
                valkey.stop()


@pytest.fixture
def hosts(started: Hosts, request: pytest.FixtureRequest) -> Hosts:
    run = re.sub(r"\W", "-", request.node.name)[:100]
    return started._replace(settings=replace(started.settings, preflight_run=run))


def test_each_way_of_each_rank_is_named(hosts: Hosts) -> None:
    first, second = hosts.check()
    assert set(first) == {f"rank {own} to rank {other}" for own in (0, 1) for other in (2, 3)}
    assert set(second) == {
        f"rank {own} to {other}" for own in (2, 3) for other in ("the head", "rank 0", "rank 1")
    }
    for address, found in zip(reversed(OF_RANKS), (first, second), strict=True):
        for each in found.values():
            assert each.is_ok
            assert re.fullmatch(rf"{re.escape(address)}:\d+ answers in [\d.]+ ms", each.text)
    assert second["rank 3 to the head"].text.startswith(f"{OF_RANKS[0]}:29500 ")


def test_a_way_on_which_packets_get_lost_is_named(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_ways, "CONNECT_S", 0.5)
    other = hosts.both.namespaces[1]
    entry = ["ip", "-n", other, "neigh"], [OF_RANKS[0], "dev", INTERFACE]
    subprocess.run([*entry[0], "replace", *entry[1], "lladdr", "02:00:00:00:00:09"], check=True)
    try:
        for found in hosts.check():
            assert not any(each.is_ok for each in found.values())
            for each in found.values():
                assert "within 0.5 s: let the hosts of a worker reach each other" in each.text
    finally:
        subprocess.run([*entry[0], "del", *entry[1]], check=True)


def test_a_way_without_a_route_is_named(hosts: Hosts) -> None:
    other = hosts.both.namespaces[1]
    route = ["ip", "-n", other, "route"], ["unreachable", f"{OF_RANKS[0]}/32"]
    subprocess.run([*route[0], "add", *route[1]], check=True)
    try:
        _, second = hosts.check()
        assert len(second) == 6
        for each in second.values():
            assert str(each).startswith(f"FAIL  {each.name}: {OF_RANKS[1]} cannot connect to ")
            assert each.text.endswith("No route to host; see master_addr and host")
    finally:
        subprocess.run([*route[0], "del", *route[1]], check=True)


def test_a_program_that_answers_in_place_of_a_rank_is_found(hosts: Hosts) -> None:
    """Both hosts have the address, so the second one reaches itself."""
    command = ["ip", "-n", hosts.both.namespaces[1], "address"]
    extra = [f"{OF_RANKS[0]}/32", "dev", "lo"]
    subprocess.run([*command, "add", *extra], check=True)
    try:
        with hosts.run(1, lambda: socket.create_server((OF_RANKS[0], 29500))).result() as server:
            answers = hosts.run(1, lambda: [server.accept()[0].close() for _ in (2, 3)])
            _, second = hosts.check()
            answers.result()
        text = f"another program answers at {OF_RANKS[0]}:29500: give each host an address"
        assert second["rank 2 to the head"].text.startswith(text)
    finally:
        subprocess.run([*command, "del", *extra], check=True)


def test_a_port_that_is_taken_is_named(hosts: Hosts) -> None:
    with hosts.run(0, lambda: socket.create_server((OF_RANKS[0], 29500))).result():
        first, second = hosts.check(wait_s=1.0)
    assert first["ranks"].text == f"cannot listen at {OF_RANKS[0]}:29500: Address already in use"
    assert second["ranks"].text.startswith("process 0 has not registered: is its pod scheduled")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"preflight_processes": 3}, "preflight_processes 3 must equal nnodes 2: one process for"),
        ({"tensor_parallel": 1, "pipeline_parallel": 1}, "nnodes 2 must divide the 1 ranks"),
        ({"master_addr": None}, "nnodes 2 needs master_addr, the address of the host of node 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    changes: dict[str, object], text: str, hosts: Hosts
) -> None:
    for found in hosts.check(**changes):
        assert set(found) == {"ranks"}
        assert found["ranks"].is_ok is False
        assert found["ranks"].text.startswith(text)


def test_hosts_with_different_ranks_are_named(hosts: Hosts) -> None:
    for other, found in zip((1, 0), hosts.check(second_tp=4), strict=True):
        assert found["ranks"].text.startswith(f"process {other} on ")
        assert " has other ranks: give all processes the same tensor_" in found["ranks"].text


def test_a_worker_of_one_host_has_no_ways_to_check(hosts: Hosts) -> None:
    assert hosts.check(nnodes=None) == [{}, {}]
