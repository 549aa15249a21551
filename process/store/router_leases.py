"""Leases of routers: a new worker waits until all live routers have connected to it.

Under `baton:CLUSTER:` there are `router_lease:NAME` (expires with the lease) and `router_leases`
(the set of names). The name is the one by which a router greets workers. A router keeps its lease
until its last stream has ended, because these streams may move to a new worker.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from process.store.client_faults import answer_of, check_cancelled, drop_connections
from process.store.registry import BACKOFF_MAX_S, CLAIM_KIND, client_from_url

log = logging.getLogger(__name__)

LEASE_S = 3.0
_RENEWALS = 3
"""Renewals per lease."""

# KEYS: lease, names. ARGV: name, lease in ms.
_RENEW = f"""
{CLAIM_KIND}
claim_kind(KEYS[2], 'set')
redis.call('SET', KEYS[1], '1', 'PX', ARGV[2])
redis.call('SADD', KEYS[2], ARGV[1])
"""

# KEYS: lease, names. ARGV: name.
_LEAVE = """
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[2], ARGV[1])
"""

# KEYS: names. ARGV: prefix of leases. Answers the names with a valid lease and forgets the others.
# A key without an expiry is no lease.
_READ = f"""
{CLAIM_KIND}
claim_kind(KEYS[1], 'set')
local found = {{}}
for _, name in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  if redis.call('PTTL', ARGV[1] .. name) > 0 then
    found[#found + 1] = name
  else
    redis.call('SREM', KEYS[1], name)
  end
end
return found
"""


def read_routers(cluster: str) -> tuple[Any, ...]:
    """Arguments of `eval` that read the names of the routers with a valid lease."""
    return (_READ, 1, _names_key(cluster), _lease_key(cluster, ""))


class RouterLease:
    """Keeps one router's lease, on its event loop: a router whose loop stands still loses it.

    While the store is away, the lease ends; it is taken again when the store is back.
    """

    def __init__(self, redis_url: str, cluster: str, name: str, lease_s: float = LEASE_S) -> None:
        """Connects to nothing yet. Raises ConfigError for a malformed URL."""
        self._client: Any = client_from_url(redis.asyncio.Redis, redis_url, max(lease_s / 2, 0.5))
        self._keys = (_lease_key(cluster, name), _names_key(cluster))
        self._name = name
        self._lease_s = lease_s

    async def run(self) -> None:
        """Renew the lease until cancelled, then leave. Closes the connection."""
        try:
            while True:
                pause_s = await self._renew()
                check_cancelled()
                await asyncio.sleep(pause_s)
        finally:
            await self._leave()
            await self._client.aclose()

    async def _renew(self) -> float:
        """Returns the pause before the next renewal, in seconds."""
        try:
            lease_ms = round(self._lease_s * 1e3)
            await answer_of(self._client.eval(_RENEW, 2, *self._keys, self._name, lease_ms))
        except (RedisError, OSError) as error:
            log.debug("the router's lease was not renewed: %s", error)
            await drop_connections(self._client)
            return min(BACKOFF_MAX_S, self._lease_s / _RENEWALS)
        return self._lease_s / _RENEWALS

    async def _leave(self) -> None:
        try:
            await answer_of(self._client.eval(_LEAVE, 2, *self._keys, self._name))
        except (RedisError, OSError) as error:
            log.debug("the router's lease ends by itself: %s", error)


def _lease_key(cluster: str, name: str) -> str:
    return f"baton:{cluster}:router_lease:{name}"


def _names_key(cluster: str) -> str:
    return f"baton:{cluster}:router_leases"
