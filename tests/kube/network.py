"""Addresses for pods and services, in the network namespace of the tests.

Each pod has a network namespace of its own, with one end of a veth pair; the other ends hang on one
bridge. A service's address belongs to the loopback interface outside of the pods, where the service
proxy listens.
"""

from __future__ import annotations

import ipaddress
import itertools
import subprocess
import threading

BRIDGE = "pods"
BRIDGE_ADDRESS = "10.97.0.1"
_POD_NETWORK = ipaddress.ip_network("10.97.0.0/16")


class PodNetwork:
    """Owns the bridge; gives out addresses, and never the same twice."""

    def __init__(self) -> None:
        self._numbers = itertools.count(2)
        self._lock = threading.Lock()
        ip("link", "set", "lo", "up")
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("addr", "add", f"{BRIDGE_ADDRESS}/16", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")

    def attach(self, process: int) -> str:
        """Connect the network namespace of a process; returns its address."""
        with self._lock:
            number = next(self._numbers)
        address = str(_POD_NETWORK[number])
        outer, inner = f"veth{number}", f"in{number}"
        ip("link", "add", outer, "type", "veth", "peer", "name", inner)
        ip("link", "set", outer, "master", BRIDGE, "up")
        ip("link", "set", inner, "netns", str(process), "name", "eth0")
        inside = ["nsenter", "-t", str(process), "-n"]
        ip("link", "set", "lo", "up", inside=inside)
        ip("addr", "add", f"{address}/16", "dev", "eth0", inside=inside)
        ip("link", "set", "eth0", "up", inside=inside)
        ip("route", "add", "default", "via", BRIDGE_ADDRESS, inside=inside)
        return address


def add_service_address(address: str) -> None:
    """Take a service's address, if it is not ours yet."""
    done = subprocess.run(
        ["ip", "addr", "add", f"{address}/32", "dev", "lo"], capture_output=True, text=True
    )
    if done.returncode != 0 and "File exists" not in done.stderr:
        raise RuntimeError(f"ip addr add {address}: {done.stderr}")


def ip(*arguments: str, inside: list[str] | None = None) -> None:
    """Run `ip`. Raises CalledProcessError."""
    subprocess.run([*(inside or []), "ip", *arguments], check=True, capture_output=True)
