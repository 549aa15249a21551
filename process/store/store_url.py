"""The store's whole address: `redis_url`, and the files that its TLS needs, as one URL."""

from __future__ import annotations

from typing import Protocol
from urllib.parse import parse_qsl, urlencode, urlsplit

from protocol.addresses import parsed_address, shown_address
from protocol.errors import ConfigError


class StoreSettings(Protocol):
    """The settings that name a store."""

    @property
    def redis_url(self) -> str | None: ...
    @property
    def redis_ca_file(self) -> str | None: ...
    @property
    def redis_cert_file(self) -> str | None: ...
    @property
    def redis_key_file(self) -> str | None: ...


def store_url(settings: StoreSettings) -> str:
    """`redis_url` with the files as redis-py's parameters; a malformed one stays as it is. Raises
    ConfigError for files without TLS."""
    given = {
        "redis_ca_file": ("ssl_ca_certs", settings.redis_ca_file),
        "redis_cert_file": ("ssl_certfile", settings.redis_cert_file),
        "redis_key_file": ("ssl_keyfile", settings.redis_key_file),
    }
    url = settings.redis_url or ""
    files = {name: parameter for name, parameter in given.items() if parameter[1]}
    if not files or (url and parsed_address(url) is None):
        return url
    parts = urlsplit(url)
    if parts.scheme != "rediss":
        shown = shown_address(url) if url else "missing"
        raise ConfigError(f"{min(files)}: redis_url is {shown}, and only rediss:// has TLS")
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    for parameter, value in files.values():
        query[parameter] = value or ""
    return parts._replace(query=urlencode(query)).geturl()
