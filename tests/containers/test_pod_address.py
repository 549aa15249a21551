"""The address that a worker advertises, with the networks that a pod may have."""

from __future__ import annotations

import subprocess

import pytest

from tests.containers.sandbox import environment, in_namespaces, needs_namespaces, python
from tests.paths import ROOT

pytestmark = needs_namespaces()

LOOPBACK = "ip link set lo up"
CARD = (
    f"{LOOPBACK}; ip link add eth0 type veth peer name other; "
    "ip link set other up; ip link set eth0 up"
)
IPV4 = f"{CARD}; ip addr add 10.9.8.7/24 dev eth0"
IPV6 = f"{CARD}; ip -6 addr add fd00::7/64 dev eth0 nodad"

SHOW = """
import sys
from process.sockets.outer_address import outer_address
from protocol.errors import ConfigError
try:
    print(outer_address(sys.argv[1] or None, sys.argv[2] == "4"))
except ConfigError as error:
    print(error)
"""


def shown(setup: str, store: str, family: str) -> str:
    done = subprocess.run(
        in_namespaces([*python(SHOW), store, family], setup),
        env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("setup", "store", "family", "address"),
    [
        (IPV4, "10.9.8.1", "4", "10.9.8.7"),
        (f"{IPV4}; ip route add default via 10.9.8.1", "203.0.113.5", "4", "10.9.8.7"),
        (f"{IPV4}; ip route add default via 10.9.8.1", "127.0.0.1", "4", "10.9.8.7"),
        (f"{IPV4}; ip route add default via 10.9.8.1", "", "4", "10.9.8.7"),
        (IPV6, "fd00::1", "6", "fd00::7"),
        (LOOPBACK, "127.0.0.1", "4", "127.0.0.1"),
        (LOOPBACK, "::1", "6", "::1"),
    ],
)
def test_the_address_on_the_way_to_the_store_or_out(
    setup: str, store: str, family: str, address: str
) -> None:
    assert shown(setup, store, family) == address


def test_without_a_way_out_the_setting_is_named() -> None:
    assert "--advertise-address" in shown(LOOPBACK, "10.9.8.1", "4")
