"""A fleet on one host can be reached from that host only, also past sockets that ask for keys; one
on two hosts only on the interface that the operator names."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from bench.sockets import Seen, between_hosts, refused, strays
from bench.tools.listeners import listeners_of
from bench.tools.two_hosts import ADDRESSES, INTERFACE, TwoHosts
from tests.integration.fleets import complete, counters, running_fleet
from tests.integration.reference import DEMO_MODEL


@pytest.mark.parametrize(
    ("transport", "num_ports", "unix"),
    [("nixl", 3, ""), ("auto", 2, "@baton-kv-")],
    ids=["nixl", "shared memory"],
)
def test_every_socket_of_a_fleet_listens_on_loopback(
    transport: str, num_ports: int, unix: str
) -> None:
    with running_fleet(
        prefill=1, decode=1, transport=transport, local_prefill_threshold_tokens=0
    ) as fleet:
        complete(fleet, [7] * 40, max_tokens=2)
        assert counters(fleet, "decode-1")["handoffs"] == 1, "connections that are made later count"
        found = {name: listeners_of(child.pid) for name, child in fleet.processes.items()}
    assert strays(Seen(found, transport, 0)) == []
    for name in ("prefill-1", "decode-1"):
        kinds = [each.kind for each in found[name]]
        assert kinds.count("TCP") == num_ports, "the control and event sockets, and UCX's"
        assert kinds.count("UDP") == 0
        assert all(unix in str(each) for each in found[name] if each.kind == "Unix")
        assert not unix or kinds.count("Unix") == 1


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    if reason := TwoHosts.why_not():
        if os.environ.get("REQUIRE_NETWORK_NAMESPACES"):
            pytest.fail(f"network namespaces are required here: {reason}")
        pytest.skip(reason)
    with TwoHosts() as made:
        yield made


def test_between_hosts_kv_blocks_move_on_the_named_interface_only(hosts: TwoHosts) -> None:
    seen = between_hosts(str(DEMO_MODEL), hosts)
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
