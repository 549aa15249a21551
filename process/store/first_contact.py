"""The first question to the store, before anything slow: is it the store that the operator means?

A store that is away is waited for later. One that answers and refuses us will not change its mind.
"""

from __future__ import annotations

import logging
from typing import Any

import redis
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError

from process.store.registry import Registry, client_from_url
from protocol.addresses import shown_address
from protocol.errors import ConfigError

log = logging.getLogger(__name__)

_REFUSALS = ("DB index", "DENIED")
"""No such database; protected mode."""


def check_store(redis_url: str, cluster: str, timeout_s: float = 2.0) -> None:
    """Read the fleet once. Raises ConfigError for a malformed URL, or if the store refuses our
    password, our scripts or the database; logs a warning if it cannot be reached."""
    client: Any = client_from_url(redis.Redis, redis_url, timeout_s)
    try:
        client.eval(*Registry(cluster).read())
    except (RedisError, OSError) as error:
        if is_refusal(error):
            raise refused(shown_address(redis_url), error) from error
        log.warning("cannot reach %s yet: %s", shown_address(redis_url), error)
    finally:
        client.close()


def is_refusal(error: Exception) -> bool:
    """Whether the store answers, and will not serve us whenever we ask again."""
    if isinstance(error, (AuthenticationError, NoPermissionError)):
        return True
    return isinstance(error, ResponseError) and any(each in str(error) for each in _REFUSALS)


def refused(where: str, error: Exception) -> ConfigError:
    """The error that names the store and why it refuses this process."""
    return ConfigError(f"redis_url {where}: the store refuses it: {error}")
