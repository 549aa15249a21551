"""Checks, before anything slow, that the store is the one that the operator means. A process later
waits for a store that is unreachable now. A store that answers and refuses us will keep refusing.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import redis
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError

from process.store.registry import Registry, client_from_url
from process.store.store_tls import CertificateError
from protocol.addresses import shown_address
from protocol.errors import ConfigError

log = logging.getLogger(__name__)

_REFUSALS = ("DB index", "DENIED")
"""No such database; protected mode."""
_HUNG_UP = re.compile("closed by server|reset by peer|Broken pipe|Protocol Error|_ALERT_CERT")
"""Errors with which a TLS port answers a client without TLS or without a certificate; with TLS 1.3
they come after the handshake."""


def check_store(redis_url: str, cluster: str, timeout_s: float = 2.0) -> None:
    """Read the fleet once. Raises ConfigError for a malformed URL, for a store that refuses our
    password, our scripts or the database, and for a certificate that we do not trust. If the store
    cannot be reached, logs a warning."""
    client: Any = client_from_url(redis.Redis, redis_url, timeout_s)
    try:
        client.eval(*Registry(cluster).read())
    except (RedisError, OSError) as error:
        if is_refusal(error):
            raise refused(shown_address(redis_url), error) from error
        log.warning("cannot reach %s yet: %s", shown_address(redis_url), advised(redis_url, error))
    finally:
        client.close()


def is_refusal(error: Exception) -> bool:
    """Whether asking again cannot help: the store answers, but refuses us, or we do not trust
    it."""
    if isinstance(error, (AuthenticationError, NoPermissionError)):
        return True
    if isinstance(error.__context__, CertificateError):
        return True
    return isinstance(error, ResponseError) and any(each in str(error) for each in _REFUSALS)


def refused(where: str, error: Exception) -> ConfigError:
    """The error that names the store and why it refuses this process."""
    what = "" if isinstance(error.__context__, CertificateError) else "the store refuses it: "
    return ConfigError(f"redis_url {where}: {what}{error}")


def advised(redis_url: str, error: Exception) -> str:
    """An error of a store that has never served us, with a hint at what may be wrong with the
    URL."""
    text = str(error)
    if not _HUNG_UP.search(text):
        return text
    if redis_url.startswith("redis:"):
        return f"{text.rstrip('.')}; if it speaks TLS at this port, give rediss://"
    if redis_url.startswith("rediss:") and "ssl_certfile=" not in redis_url:
        return f"{text.rstrip('.')}; if it wants certificates of its clients, set redis_cert_file"
    return text
