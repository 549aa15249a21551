"""The tenant of a request: the owner of a key, with the terms of that key.

The tenant decides which clients share a cache, whose turn it is, how many requests may be in
flight, and how urgent they may be. Pure.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from protocol.errors import InvalidRequest

_DIGEST_BYTES = 16
_PURPOSE = b"baton tenant"


@dataclass(frozen=True, slots=True)
class KeyTerms:
    """The terms of a key.

    - `priority`: the priority of requests that name none. As in the API, lower values are served
      earlier.
    - `max_priority`: the most urgent priority that a request may name (None: any).
    - `inflight`: the most sequences in flight (None: the router's default).
    - `cache`: keys with the same value share cached prefixes; a key without one shares with no
      other key.
    - `ttft_ms`, `tpot_ms`: targets of requests that name none, in milliseconds: to the first token,
      and for each later one (None: the router's).
    - `tiers`: workers may keep the KV of its requests in host memory and on disk, too.
    """

    name: str
    priority: int = 0
    max_priority: int | None = 0
    inflight: int | None = None
    cache: str | None = None
    tiers: bool = True
    ttft_ms: int | None = None
    tpot_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of a key. Workers give all tenants equal turns, by `share`; tenants with the same
    `cache_salt` share cached prefixes. Without keys there is one tenant, for which both are
    empty."""

    terms: KeyTerms
    share: str = ""
    cache_salt: str = ""

    def salt_with(self, own_salt: str) -> str:
        """The salt of a request that names its own: the tenant's salt combined with it, never
        replaced."""
        if not self.cache_salt and not own_salt:
            return ""
        return f"{self.cache_salt}/{own_salt}"

    def priority_of(self, asked: int | None) -> int:
        """The priority of a request, in the API's terms. Raises InvalidRequest if the key does not
        allow the requested one."""
        if asked is None:
            return self.terms.priority
        most = self.terms.max_priority
        if most is not None and asked < most:
            raise InvalidRequest(
                f"'priority': {asked} is more urgent than this key allows; the most urgent "
                f"is {most}",
                "priority",
            )
        return asked


EVERYBODY = Tenant(KeyTerms("", max_priority=None))
"""The tenant of all requests of a router without API keys."""


def tenant_of(key: str, terms: KeyTerms, secret: bytes) -> Tenant:
    """The tenant that owns an admitted key. The same on all routers of a cluster, because names
    and salts derive from its secret; neither reveals the key."""
    digest = hashlib.blake2b(
        key.encode(), digest_size=_DIGEST_BYTES, key=secret[:64], person=_PURPOSE
    ).hexdigest()
    salt = f"key:{digest}" if terms.cache is None else f"group:{terms.cache}"
    return Tenant(terms, digest, salt)
