"""Properties of host names and addresses, without asking a name server."""

from __future__ import annotations

import ipaddress
from functools import lru_cache

_MAX_ADDRESS_CHARS = 64
"""The most characters of an address with its zone."""


def is_loopback(host: str) -> bool:
    """Whether a listening address is reachable only from this host."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_wildcard(host: str) -> bool:
    """Whether a listening address means all addresses of this host."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return host == "*"


def is_address(host: str) -> bool:
    """Whether a host is an IP address, which no name server can point elsewhere. Quick for the
    hosts of earlier calls: every HTTP request may ask."""
    return len(host) <= _MAX_ADDRESS_CHARS and _is_address(host)


@lru_cache(maxsize=1024)
def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(unbracketed(host))
    except ValueError:
        return False
    return True


def unbracketed(host: str) -> str:
    """The host in the form for sockets: an IPv6 address without brackets."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def bracketed(host: str) -> str:
    """The host in the form for URLs and endpoints: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
