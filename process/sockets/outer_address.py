"""The address by which other hosts reach this one: that of its interface towards the store.

Asks the kernel's routing table, and a name server for the store's name. Sends no packet: connecting
a UDP socket only looks up its route.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator

from process.sockets.host_names import is_loopback
from protocol.errors import ConfigError

_ANY_PORT = 9
_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses that no host has (RFC 5737, RFC 3849); their route is the default route."""


def outer_address(store_host: str | None, is_ipv4_only: bool) -> str:
    """This host's address on the route to the store, otherwise on the default route.

    If there is no route but the store is on this host, returns the loopback address: only processes
    of this host can read the registration then. Raises ConfigError if there is no address.
    """
    families = [socket.AF_INET] if is_ipv4_only else [socket.AF_INET, socket.AF_INET6]
    towards_store = [
        own for family in families for own in _addresses_towards(store_host or "", family)
    ]
    towards_others = [
        own for family in families for own in _addresses_towards(_ELSEWHERE[family], family)
    ]
    for own in (*towards_store, *towards_others):
        address = ipaddress.ip_address(own)
        if not (address.is_loopback or address.is_link_local):
            return own
    if towards_store and is_loopback(towards_store[0]):
        return towards_store[0]
    raise ConfigError(
        "no network leads from this host to the store or elsewhere: name the address by which "
        "others reach this worker, with --advertise-address"
    )


def _addresses_towards(host: str, family: socket.AddressFamily) -> Iterator[str]:
    """Our own addresses on the route to a host; none if the host is unknown or there is no
    route."""
    try:
        found = socket.getaddrinfo(host, _ANY_PORT, family, socket.SOCK_DGRAM) if host else []
    except OSError:
        return
    for *_, where in found:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(where)
            except OSError:
                continue
            yield str(probe.getsockname()[0])
