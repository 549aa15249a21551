"""The origin of the current HTTP request: its arrival time and its key.

Tasks inherit the context, so the trace of a generation can name its origin without passing it
through the API. A caller is known by a digest of its key, under a salt of the cluster, never by the
key itself, so that all routers know the same caller.
"""

from __future__ import annotations

import hashlib
import ipaddress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec
from starlette.types import Scope

from http_kit.disconnect import ClientConnection
from http_kit.tenant import EVERYBODY, Tenant

CALLER = "baton.caller"
"""The key of an ASGI scope under which its `Caller` is."""
KEY_NAME = "baton.key_name"
"""The key of an ASGI scope under which the name of an operator's key is."""
_DIGEST_BYTES = 16
_PURPOSE = b"baton caller"


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request; `digest` is empty without a key. `tenant` is the owner of its API
    key."""

    digest: bytes = b""
    is_admin: bool = False
    tenant: Tenant = field(default=EVERYBODY, compare=False)

    def may_read(self, owner: bytes) -> bool:
        """Whether this caller may read what the caller with digest `owner` sent."""
        return self.is_admin or self.digest == owner


NOBODY = Caller()


class Origin(msgspec.Struct, frozen=True):
    """The origin of a request; `arrived_us` is the arrival time of its head. `share` is that of
    `share_of`, empty for the router's own work."""

    arrived_us: int
    caller: Caller = NOBODY
    share: str = ""
    connection: ClientConnection | None = None


CURRENT_ORIGIN: ContextVar[Origin | None] = ContextVar("current_origin", default=None)


def digest_of(key: str, salt: bytes) -> bytes:
    """The digest by which a cluster knows a key. `salt` is the cluster's secret; only its first 64
    bytes are used."""
    return hashlib.blake2b(
        key.encode(), digest_size=_DIGEST_BYTES, key=salt[:64], person=_PURPOSE
    ).digest()


def owner_of(scope: Scope) -> str:
    """The owner of data that a request leaves behind, such as kept responses and streams to resume:
    the digest of its API key. On a router without keys, the digest of whatever key the request
    sends."""
    caller: Caller = scope.get(CALLER, NOBODY)
    return caller.tenant.share or caller.digest.hex() or "nobody"


def share_of(scope: Scope) -> str:
    """The caller in whose turn a request is served, and whose part of the router's memory it
    takes: the owner of its API key. On a router without keys, its address."""
    caller: Caller = scope.get(CALLER, NOBODY)
    return caller.tenant.share or _network_of(scope["client"][0] if scope.get("client") else "")


@lru_cache(maxsize=4096)
def _network_of(address: str) -> str:
    """The IPv4 address, or the first 64 bits of an IPv6 address, because one host may use all
    addresses with these bits."""
    if ":" not in address:
        return address
    try:
        parsed = ipaddress.IPv6Address(address)
    except ValueError:
        return address
    plain = parsed.ipv4_mapped
    return str(ipaddress.IPv6Network((int(parsed) >> 64 << 64, 64)) if plain is None else plain)
