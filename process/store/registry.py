"""The fleet's keys in Redis or Valkey, and how a reader interprets them.

Under `baton:CLUSTER:` there are `worker:ID` (JSON of WorkerInfo, expires with its lease),
`workers` (the set of ids), `epoch` (a random text, which changes if the store loses its memory),
`drain:ID` (the incarnation that is asked to drain) and the channel `membership` (announces
changes). A worker missing from a store that lost its memory or was unreachable may still be alive:
for SETTLE_S after the store is back, readers keep the members that they knew.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from process.store.certificate_expiry import Expiry
from process.store.ignored_entries import REGISTRATION, IgnoredEntries
from process.store.resolved_connection import NameResolver, resolve_apart
from process.store.store_tls import split_tls
from process.store.tls_connection import TlsConnection
from protocol import wire
from protocol.addresses import ESCAPES, parsed_address, shown_address
from protocol.errors import ConfigError, ProtocolError
from protocol.registration import WorkerInfo

SETTLE_S = 3.0
BACKOFF_S = 0.1
BACKOFF_MAX_S = 1.0

MAX_ENTRY_BYTES = 64 * 1024
"""Longer entries are ignored unread."""

CLAIM_KIND = """
local function claim_kind(key, kind)
  local found = redis.call('TYPE', key).ok
  if found == kind or found == 'none' then return false end
  redis.call('DEL', key)
  return true
end
"""
"""A Lua function for the scripts below: deletes a key of the fleet if its value has another type.
Returns whether it did."""

# KEYS: worker, workers. ARGV: registration, lease in ms, id, incarnation, channel, "1" to create a
# missing registration, and the entry that ours may replace: its incarnation, or its SHA-1 if it is
# not a registration. Answers three values: the former registration, 1 if ours is in place, and the
# time in ms until another holder's lease ends. An entry without an incarnation has no holder. An
# entry that is too long or not a string is deleted, and the first value is ''.
REGISTER = f"""
{CLAIM_KIND}
local was_overwritten = claim_kind(KEYS[1], 'string')
claim_kind(KEYS[2], 'set')
if redis.call('STRLEN', KEYS[1]) > {MAX_ENTRY_BYTES} then
  redis.call('DEL', KEYS[1])
  was_overwritten = true
end
local former = redis.call('GET', KEYS[1])
local holder = ARGV[4]
if former then
  local ok, info = pcall(cjson.decode, former)
  if ok and type(info) == 'table' and type(info.incarnation) == 'string' then
    holder = info.incarnation
  end
elseif ARGV[6] ~= '1' then
  return {{was_overwritten and '' or false, 0, 0}}
end
if holder ~= ARGV[4] and holder ~= ARGV[7] and redis.sha1hex(former) ~= ARGV[7] then
  return {{former, 0, redis.call('PTTL', KEYS[1])}}
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('SADD', KEYS[2], ARGV[3])
if former ~= ARGV[1] then
  redis.call('PUBLISH', ARGV[5], ARGV[3])
end
return {{former, 1, 0}}
"""

# KEYS: worker, workers. ARGV: id, incarnation, channel.
LEAVE = """
local former = redis.call('GET', KEYS[1])
if not former then
  return 0
end
local ok, info = pcall(cjson.decode, former)
if ok and type(info) == 'table' and info.incarnation ~= ARGV[2] then
  return 0
end
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[2], ARGV[1])
redis.call('PUBLISH', ARGV[3], ARGV[1])
return 1
"""

# KEYS: workers, epoch. ARGV: prefix of worker keys, an epoch to set if there is none.
# Answers the epoch, then id and registration of each worker in turn. A value that is too long, or
# not a string, is read as empty.
READ = f"""
{CLAIM_KIND}
claim_kind(KEYS[1], 'set')
claim_kind(KEYS[2], 'string')
local function value_of(key)
  local size = redis.pcall('STRLEN', key)
  if type(size) ~= 'number' or size > {MAX_ENTRY_BYTES} then return '' end
  return redis.call('GET', key)
end
redis.call('SET', KEYS[2], ARGV[2], 'NX')
local found = {{value_of(KEYS[2])}}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local value = value_of(ARGV[1] .. id)
  if value then
    found[#found + 1] = id
    found[#found + 1] = value
  else
    redis.call('SREM', KEYS[1], id)
  end
end
return found
"""


@dataclass(frozen=True)
class Registry:
    """The keys and script calls of one fleet in the store."""

    cluster: str

    @property
    def channel(self) -> str:
        """The channel that announces changes; the text is the worker's id."""
        return f"baton:{self.cluster}:membership"

    @property
    def workers_key(self) -> str:
        """The key of the set of ids."""
        return f"baton:{self.cluster}:workers"

    def worker_key(self, worker_id: str) -> str:
        """The key of one worker's registration."""
        return f"baton:{self.cluster}:worker:{worker_id}"

    def drain_key(self, worker_id: str) -> str:
        """The key of a request to drain. Its value names the incarnation that is asked; after the
        prefix `resume:`, the request is taken back."""
        return f"baton:{self.cluster}:drain:{worker_id}"

    def claim(self, info: WorkerInfo, lease_s: float, replaces: str = "") -> tuple[Any, ...]:
        """Arguments of `eval` that register under an id that is free or held by the entry that
        `replaces` names; see REGISTER."""
        return self._register(info, lease_s, "1", replaces)

    def renew(self, info: WorkerInfo, lease_s: float) -> tuple[Any, ...]:
        """Arguments of `eval` that renew our own registration; see REGISTER."""
        return self._register(info, lease_s, "0", "")

    def _register(
        self, info: WorkerInfo, lease_s: float, may_create: str, replaces: str
    ) -> tuple[Any, ...]:
        return (
            REGISTER,
            2,
            self.worker_key(info.worker_id),
            self.workers_key,
            wire.encode_worker_info(info),
            max(1, round(lease_s * 1000)),
            info.worker_id,
            info.incarnation,
            self.channel,
            may_create,
            replaces,
        )

    def leave(self, info: WorkerInfo) -> tuple[Any, ...]:
        """Arguments of `eval` that remove our own registration; see LEAVE."""
        keys = (self.worker_key(info.worker_id), self.workers_key)
        return (LEAVE, 2, *keys, info.worker_id, info.incarnation, self.channel)

    def read(self) -> tuple[Any, ...]:
        """Arguments of `eval` that read the whole fleet; see READ."""
        keys = (self.workers_key, f"baton:{self.cluster}:epoch")
        return (READ, 2, *keys, self.worker_key(""), secrets.token_hex(8))


class FleetView:
    """The fleet as one reader knows it: `members` by id. Pure; `take` feeds it answers.

    Registrations that cannot be decoded are left out, and noted in `ignored`.
    """

    def __init__(self, settle_s: float = SETTLE_S, ignored: IgnoredEntries | None = None) -> None:
        self.members: dict[str, WorkerInfo] = {}
        self._ignored = ignored or IgnoredEntries()
        self._settle_s = settle_s
        self._settled_at = 0.0
        self._epoch: bytes | None = None
        self._is_interrupted = False

    def interrupted(self) -> None:
        """Note that the store was unreachable: leases may have ended for this reason alone."""
        self._is_interrupted = True

    def is_settled(self, now: float) -> bool:
        """Whether the store is reliable: it has not been away or lost its memory recently."""
        return now >= self._settled_at and not self._is_interrupted

    def take(self, reply: Sequence[bytes], now: float) -> bool:
        """Take an answer to `Registry.read`; True if members changed. `now` is monotonic."""
        epoch, found = reply[0], self._decode(reply[1:])
        forgot = self._epoch is not None and epoch != self._epoch
        if forgot or self._is_interrupted:
            self._settled_at = now + self._settle_s
        self._epoch, self._is_interrupted = epoch, False
        members = self.members | found if now < self._settled_at else found
        changed = members != self.members
        self.members = members
        return changed

    def _decode(self, pairs: Sequence[bytes]) -> dict[str, WorkerInfo]:
        found: dict[str, WorkerInfo] = {}
        for name, value in zip(pairs[::2], pairs[1::2], strict=True):
            worker_id = name.decode(errors="replace")
            try:
                info = wire.decode_worker_info(value)
                if info.worker_id != worker_id:
                    raise ProtocolError(f"it names {info.worker_id!r}")
            except ProtocolError as error:
                self._ignored.note(REGISTRATION, worker_id, value, error)
            else:
                found[worker_id] = info
        return found


def connection_options(timeout_s: float, is_async: bool = False) -> dict[str, Any]:
    """Options of a client that fails fast and never retries; our loops do the retrying."""
    retry = AsyncRetry(NoBackoff(), 0) if is_async else Retry(NoBackoff(), 0)
    return {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": retry,
        "client_name": "baton",
    }


def client_from_url(factory: Any, redis_url: str, timeout_s: float) -> Any:
    """`factory` is a client class, sync or asyncio; `timeout_s` is for connecting and for answers.
    The lookup of a name has its own limit. Raises ConfigError for a malformed URL."""
    check_url(redis_url)
    is_async = factory is redis.asyncio.Redis
    bare_url, tls = split_tls(redis_url)
    try:
        client = factory.from_url(bare_url, **connection_options(timeout_s, is_async))
        redis.ConnectionPool.from_url(bare_url).make_connection()  # which takes the parameters
    except (ValueError, TypeError):
        where = f"redis_url {shown_address(redis_url)}"
        raise ConfigError(
            f"{where}: redis-py does not know its scheme or a parameter after the ?"
        ) from None
    if is_async:
        resolve_apart(client, NameResolver(), tls)
    elif tls is not None:
        client.connection_pool.connection_class = TlsConnection
        client.connection_pool.connection_kwargs["tls"] = tls
    return client


def expiry_of(client: Any) -> Expiry:
    """When the store's certificate, as last shown to this client, expires."""
    tls = client.connection_pool.connection_kwargs.get("tls")
    return Expiry() if tls is None else tls.expiry


def check_url(redis_url: str) -> None:
    """Raises ConfigError for a URL without a host, or with an invalid port or database, for which
    the client would silently use its defaults."""
    parts = parsed_address(redis_url)
    if parts is None or (parts.scheme != "unix" and parts.port == 0):
        raise ConfigError(
            f"redis_url is malformed: give redis://[:password@]host[:port][/db]; {ESCAPES}"
        )
    database = parts.path.removeprefix("/")
    if parts.scheme != "unix" and database and not (database.isascii() and database.isdigit()):
        where = f"redis_url {shown_address(redis_url)}"
        raise ConfigError(f"{where}: the database {database!r} is not a number")
