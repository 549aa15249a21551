"""The responses of the API that are kept in the store, with their owners, lifetimes and limits.

Remembered answers are kept in the same way, on another shelf (`baton:CLUSTER:answers:`). Under
`baton:CLUSTER:responses:` there are `record:OWNER:ID` (a hash: `status`, `background`, `answer`,
`input`, `events` of a stream; expires), `lease:OWNER:ID` (held by the router that runs the
response), `all` (OWNER:ID by age), `of:OWNER` (ids by age), `sizes` (bytes by OWNER:ID), `owners`
(owners by their bytes) and `total` (bytes). The store carries bytes; their meaning is the caller's.

An owner has at most `MOST_RECORDS`; beyond that, the owner's oldest ones are dropped. If all
records together exceed `max_bytes`, the oldest of the owner with the most bytes are dropped. A
running response whose lease has ended is marked as failed when it is read next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import redis.asyncio
from redis.exceptions import (
    AuthenticationError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from process.store.client_faults import answer_of, check_cancelled, drop_connections
from process.store.registry import BACKOFF_MAX_S, CLAIM_KIND, client_from_url
from protocol.error_line import one_line
from protocol.errors import StoreAway, StoreFull, StoreRefused

log = logging.getLogger(__name__)
_T = TypeVar("_T")

TTL_S = 24 * 3600
MOST_RECORDS = 1000
TIMEOUT_S = 2.0
_OVERHEAD_BYTES = 512
"""Bytes counted for a record in addition to its answer and its input."""
_MOST_TRIES = 5
_IS_FULL = "OOM command not allowed"
_MOST_AT_ONCE = 32
"""The most commands in flight."""
QUEUED, IN_PROGRESS, FAILED, CANCELLED = "queued", "in_progress", "failed", "cancelled"

# KEYS: the prefix of all keys. Each script's first ARGV is OWNER:ID.
_COMMON = (
    f"""{CLAIM_KIND}"""
    + """
local base, name = KEYS[1], ARGV[1]
local record, lease = base .. 'record:' .. name, base .. 'lease:' .. name
claim_kind(record, 'hash')
claim_kind(base .. 'sizes', 'hash')
claim_kind(base .. 'total', 'string')
for _, key in ipairs({'all', 'of:' .. string.match(name, '^[^:]*'), 'owners'}) do
  claim_kind(base .. key, 'zset')
end
local function owner_of(each) return string.match(each, '^[^:]*') end
local function count(text)
  local number = text and string.match(text, '^%d+$') and tonumber(text)
  return number and number < 1e15 and number or 0
end
local function total() return count(redis.call('GET', base .. 'total')) end
local function resize(each, bytes)
  local change = bytes - count(redis.call('HGET', base .. 'sizes', each))
  redis.call('HSET', base .. 'sizes', each, bytes)
  redis.call('ZINCRBY', base .. 'owners', change, owner_of(each))
  local sum = string.format('%.0f', math.max(0, total() + change))
  redis.call('SET', base .. 'total', sum, 'KEEPTTL')
end
local function drop(each)
  local owner = owner_of(each)
  -- deletions first, which a full store allows; they free memory for the other commands
  redis.call('DEL', base .. 'record:' .. each, base .. 'lease:' .. each)
  resize(each, 0)
  redis.call('HDEL', base .. 'sizes', each)
  redis.call('ZREM', base .. 'all', each)
  redis.call('ZREM', base .. 'of:' .. owner, string.sub(each, #owner + 2))
  redis.call('ZREMRANGEBYSCORE', base .. 'owners', '-inf', 0)
end
local function runs(status) return status == 'queued' or status == 'in_progress' end
local function look()
  local status = redis.call('HGET', record, 'status')
  if runs(status) and redis.call('EXISTS', lease) == 0 then
    redis.pcall('HSET', record, 'status', 'failed')  -- which a full store does not allow
    return 'failed'
  end
  return status
end
local function found()
  local status = look()
  if not status then return false end
  return {status, unpack(redis.call('HMGET', record, 'background', 'answer', 'input', 'events'))}
end
local function oldest_of_largest()
  local owner = redis.call('ZREVRANGE', base .. 'owners', 0, 0)[1]
  if owner then claim_kind(base .. 'of:' .. owner, 'zset') end
  local oldest = owner and redis.call('ZRANGE', base .. 'of:' .. owner, 0, 0)[1]
  if owner and not oldest then redis.call('ZREM', base .. 'owners', owner) end
  return oldest and owner .. ':' .. oldest, owner
end
local function make_room(most_bytes)
  while total() > most_bytes do
    local oldest, owner = oldest_of_largest()
    if not owner then break end
    if oldest then drop(oldest) end
  end
end
"""
)

# ARGV: name, bytes. Drops other records until so many bytes are free: always the oldest record of
# the owner with the most bytes. Answers how many records were dropped.
_FREE = """
local left, dropped, tries = tonumber(ARGV[2]), 0, 0
while left > 0 and tries < 1000 do
  tries = tries + 1
  local oldest, owner = oldest_of_largest()
  if not owner or oldest == name then break end
  if oldest then
    left = left - count(redis.call('HGET', base .. 'sizes', oldest))
    drop(oldest)
    dropped = dropped + 1
  end
end
return dropped
"""

# ARGV: name, owner, id, ttl in s, most records, most bytes, overhead, lease in ms (0: none),
# status, background, answer, input, and events if there are any.
_PUT = """
local owner, ttl_s = ARGV[2], tonumber(ARGV[4])
local time = redis.call('TIME')
local now = time[1] .. string.format('%06d', time[2])
redis.call('HSET', record, 'status', ARGV[9], 'background', ARGV[10], 'answer', ARGV[11],
           'input', ARGV[12])
if ARGV[13] then redis.call('HSET', record, 'events', ARGV[13]) end
redis.call('EXPIRE', record, ttl_s)
redis.call('ZADD', base .. 'all', 'NX', now, name)
redis.call('ZADD', base .. 'of:' .. owner, 'NX', now, ARGV[3])
resize(name, #ARGV[11] + #ARGV[12] + tonumber(ARGV[7]))
if ARGV[8] ~= '0' then redis.call('SET', lease, '1', 'PX', ARGV[8]) end
for _, key in ipairs({'all', 'of:' .. owner, 'sizes', 'owners', 'total'}) do
  redis.call('EXPIRE', base .. key, ttl_s)
end
local dead = string.format('%.0f', tonumber(now) - ttl_s * 1e6)
for _, each in ipairs(redis.call('ZRANGEBYSCORE', base .. 'all', '-inf', dead, 'LIMIT', 0, 100)) do
  drop(each)
end
local extra = redis.call('ZCARD', base .. 'of:' .. owner) - tonumber(ARGV[5])
if extra > 0 then
  for _, id in ipairs(redis.call('ZRANGE', base .. 'of:' .. owner, 0, extra - 1)) do
    drop(owner .. ':' .. id)
  end
end
make_room(tonumber(ARGV[6]))
"""

# Answers status, background, answer, input and events; nil if there is no record.
_READ = "return found()"

# Answers whether the response still runs.
_RUNS = "return runs(look())"

# ARGV: name, status, answer, most bytes, overhead, events. Answers whether the response still ran.
_FINISH = """
if not runs(redis.call('HGET', record, 'status')) then return 0 end
redis.call('HSET', record, 'status', ARGV[2], 'answer', ARGV[3])
if ARGV[6] ~= '' then redis.call('HSET', record, 'events', ARGV[6]) end
redis.call('DEL', lease)
resize(name, #ARGV[3] + #ARGV[6] + redis.call('HSTRLEN', record, 'input') + tonumber(ARGV[5]))
make_room(tonumber(ARGV[4]))
return 1
"""

# Answers as _READ does; a response in the background that runs is cancelled.
_CANCEL = """
if runs(look()) and redis.call('HGET', record, 'background') == '1' then
  redis.call('DEL', lease)
  redis.call('HSET', record, 'status', 'cancelled')
end
return found()
"""

# Answers whether there was a record.
_DELETE = """
local was_there = redis.call('EXISTS', record)
drop(name)
return was_there
"""

# ARGV: names. Answers the answer of each, false for one that has none.
_ANSWERS = """
local found = {}
for place, name in ipairs(ARGV) do
  local answer = redis.pcall('HGET', KEYS[1] .. 'record:' .. name, 'answer')
  found[place] = type(answer) == 'string' and answer
end
return found
"""

# ARGV: name, lease in ms. Answers whether the response still runs; it is then in progress.
_RENEW = """
if not runs(redis.call('HGET', record, 'status')) then return 0 end
-- first a command that a full store allows
if redis.call('PEXPIRE', lease, ARGV[2]) == 0 then redis.call('SET', lease, '1', 'PX', ARGV[2]) end
redis.call('HSET', record, 'status', 'in_progress')
return 1
"""


@dataclass(frozen=True, slots=True)
class Shelf:
    """The records of one kind: the name in their keys, how long each is kept, and how many each
    owner may have."""

    name: str = "responses"
    ttl_s: int = TTL_S
    most_records: int = MOST_RECORDS


RESPONSES = Shelf()


@dataclass(frozen=True, slots=True)
class ResponseName:
    """A response as its owner knows it. `owner` has no colon."""

    owner: str
    id: str

    @property
    def key(self) -> str:
        """The name in the store."""
        return f"{self.owner}:{self.id}"


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """A response that is kept; only one in the background may be unfinished. `events`: those of
    its stream once it has ended, None if it is not streamed."""

    status: str
    is_background: bool
    answer: bytes
    input: bytes
    events: bytes | None = None

    @property
    def runs(self) -> bool:
        """Whether a router is running it."""
        return self.status in (QUEUED, IN_PROGRESS)


class ResponseRecords:
    """One router's access to the records. After a failure every call fails at once for a while.

    All calls raise StoreAway if the store cannot be reached, and StoreRefused if it refuses a call.
    Calls that keep something raise StoreFull if the store has no memory left, even after the oldest
    records are dropped.
    """

    def __init__(
        self,
        redis_url: str,
        cluster: str,
        max_bytes: int,
        clock: Callable[[], float],
        shelf: Shelf = RESPONSES,
    ) -> None:
        """Connects to nothing yet. Raises ConfigError for a malformed URL."""
        self._client: Any = client_from_url(redis.asyncio.Redis, redis_url, TIMEOUT_S)
        self._shelf = shelf
        self._prefix = f"baton:{cluster}:{shelf.name}:"
        self._max_bytes = max_bytes
        self._clock = clock
        self._away_until = 0.0
        self._turns = asyncio.Semaphore(_MOST_AT_ONCE)

    @property
    def is_away(self) -> bool:
        """Whether the store could not be reached a moment ago."""
        return self._clock() < self._away_until

    async def put(self, name: ResponseName, record: ResponseRecord, lease_s: float = 0) -> None:
        """Keep a record, in place of an earlier one. One that runs needs a lease."""
        await self._keep(
            _PUT, name, len(record.answer) + len(record.input), name.owner, name.id,
            self._shelf.ttl_s, self._shelf.most_records, self._max_bytes, _OVERHEAD_BYTES,
            round(lease_s * 1000), record.status, int(record.is_background), record.answer,
            record.input, *([] if record.events is None else [record.events]),
        )  # fmt: skip

    async def read(self, name: ResponseName) -> ResponseRecord | None:
        """A record, if there is one."""
        found = await self._call(_READ, name)
        check_cancelled()
        return _record_of(found)

    async def is_running(self, name: ResponseName) -> bool:
        """Whether there is such a response and a router runs it."""
        return bool(await self._call(_RUNS, name))

    async def answers(self, names: Sequence[ResponseName]) -> list[bytes | None]:
        """The answers of several records in one call."""
        keys = [each.key for each in names]
        found: list[Any] = await self._asked(
            lambda: self._client.eval(_ANSWERS, 1, self._prefix, *keys)
        )
        return [each if isinstance(each, bytes) else None for each in found]

    async def num_records(self) -> int:
        """How many records there are, of all owners; some of them may just have expired."""
        count: int = await self._asked(lambda: self._client.zcard(f"{self._prefix}all"))
        return count

    async def finish(
        self, name: ResponseName, status: str, answer: bytes, events: bytes = b""
    ) -> bool:
        """Keep the answer of a response that ran, and the events of its stream. Returns False if
        the response was cancelled, given up or deleted before."""
        found = await self._keep(
            _FINISH, name, len(answer) + len(events), status, answer, self._max_bytes,
            _OVERHEAD_BYTES, events,
        )  # fmt: skip
        return bool(found)

    async def cancel(self, name: ResponseName) -> ResponseRecord | None:
        """Cancel a response in the background that runs, on whichever router. Returns its record. A
        response that does not run, or runs in the foreground, stays as it is."""
        return _record_of(await self._call(_CANCEL, name))

    async def delete(self, name: ResponseName) -> bool:
        """Delete a record; False if there is none. Ends a response that runs."""
        return bool(await self._call(_DELETE, name))

    async def renew(self, name: ResponseName, lease_s: float) -> bool:
        """Renew the lease of a response that we run; False if it has to end: it was cancelled,
        given up or deleted."""
        return bool(await self._call(_RENEW, name, round(lease_s * 1000)))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _keep(self, script: str, name: ResponseName, num_bytes: int, *args: Any) -> Any:
        """The script's answer; a full store drops its oldest records to free `num_bytes`."""
        for _ in range(_MOST_TRIES):
            try:
                return await self._call(script, name, *args)
            except StoreFull:
                if not await self._call(_FREE, name, 2 * num_bytes + _OVERHEAD_BYTES):
                    raise
        raise StoreFull

    async def _call(self, script: str, name: ResponseName, *args: Any) -> Any:
        """The script's answer."""
        return await self._asked(
            lambda: self._client.eval(_COMMON + script, 1, self._prefix, name.key, *args)
        )

    async def _asked(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        """The store's answer; its errors become those that the class names."""
        if self.is_away:
            raise StoreAway
        try:
            async with self._turns:
                return await answer_of(ask())
        except OutOfMemoryError as error:
            raise StoreFull from error
        except ReadOnlyError as error:
            await self._note_away(error)
            raise StoreAway from error
        except (AuthenticationError, ResponseError) as error:
            if _IS_FULL in str(error):
                raise StoreFull from error
            log.warning("the store of %s refuses a call: %s", self._shelf.name, one_line(error))
            raise StoreRefused from error
        except (RedisError, OSError) as error:
            await self._note_away(error)
            raise StoreAway from error

    async def _note_away(self, error: Exception) -> None:
        if not self.is_away:
            log.warning("the store of %s cannot be used: %s", self._shelf.name, error)
        self._away_until = self._clock() + BACKOFF_MAX_S
        await drop_connections(self._client)


def _record_of(found: list[bytes | None] | None) -> ResponseRecord | None:
    if found is None:
        return None
    status, background, answer, given, events = found
    shown = (status or b"").decode(errors="replace")
    return ResponseRecord(shown, background == b"1", answer or b"", given or b"", events)
