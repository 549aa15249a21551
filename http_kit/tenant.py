"""On whose behalf a request runs: the owner of a key, with what that key allows.

Everything that tells clients apart comes from here: which cache they share, whose turn it is, how
many requests they may have in flight, how urgent these may be. Pure.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from protocol.errors import InvalidRequest

_DIGEST_BYTES = 16
_PURPOSE = b"baton tenant"


@dataclass(frozen=True, slots=True)
class KeyTerms:
    """What a key allows its owner.

    As in the API, lower priorities are served earlier: `priority` is that of requests which name
    none, `max_priority` the most urgent that a request may name (None: any). `inflight` bounds the
    sequences in flight (None: the router's default). Keys with the same `cache` share cached
    prefixes; a key without one shares them with no other key.
    """

    name: str
    priority: int = 0
    max_priority: int | None = 0
    inflight: int | None = None
    cache: str | None = None


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of a key. `share` names the tenant towards workers, which give all tenants equal
    turns; `cache_salt` decides with whom it shares cached prefixes. Without keys there is one
    tenant, for which both are empty."""

    terms: KeyTerms
    share: str = ""
    cache_salt: str = ""

    def salt_with(self, own_salt: str) -> str:
        """The salt of a request that names one itself: added to the tenant's, never instead."""
        if not self.cache_salt and not own_salt:
            return ""
        return f"{self.cache_salt}/{own_salt}"

    def priority_of(self, asked: int | None) -> int:
        """The priority of a request, in the API's terms. Raises InvalidRequest if the key does not
        allow what was asked for."""
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
