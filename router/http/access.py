"""Which key opens which path, and the 401 without one: ASGI middleware around the application.

Paths under `/v1/` and vLLM's helpers need API keys. The operator chooses for probes and
`/metrics`. The API's description is open. Every other path needs an operator's key, so that a new
path is closed by default. A key comes as a bearer token or in `x-api-key`. Without any keys all
doors are open. Knows only hashes of keys, and never repeats what a client sent.
"""

from __future__ import annotations

import enum
import ipaddress
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter
from starlette.types import ASGIApp, Receive, Scope, Send

from protocol.errors import RequestError
from router.http.anthropic_errors import error_response
from router.http.api_keys import KeyRing, load_key_ring
from router.http.errors import HttpError
from router.http.paths import API_PATHS, DOCUMENTS, PROBES
from router.settings import RouterSettings

log = logging.getLogger(__name__)

_UNAUTHORIZED = 401
_SCHEME = b"bearer"


class Door(enum.Enum):
    """The kind of key that a path needs."""

    OPEN = "open"
    API = "api"
    ADMIN = "admin"


@dataclass(frozen=True)
class AccessRules:
    """The keys of each door, and the doors of the probes and of `/metrics`.

    `supervisor` opens the same paths as admin keys, but its presence closes none: the process
    that started the router always has it, even if the operator sets no keys.
    """

    api: KeyRing = field(default_factory=KeyRing)
    admin: KeyRing = field(default_factory=KeyRing)
    supervisor: KeyRing = field(default_factory=KeyRing)
    health: Door = Door.OPEN
    metrics: Door = Door.ADMIN

    def door_of(self, path: str) -> Door:
        """The door of a path. API keys also close operators' paths; admin keys close no API."""
        door = Door.ADMIN
        if path.startswith("/v1/") or path in API_PATHS:
            door = Door.API
        elif path in PROBES:
            door = self.health
        elif path == "/metrics":
            door = self.metrics
        elif path in DOCUMENTS:
            door = Door.OPEN
        if not self.api and (door is Door.API or not self.admin):
            return Door.OPEN
        return door

    def admits(self, door: Door, key: str) -> bool:
        """Whether a key opens a closed door."""
        if door is Door.API:
            return self.api.admits(key)
        by_admin, by_supervisor = self.admin.admits(key), self.supervisor.admits(key)
        return by_admin or by_supervisor


class KeyCheck:
    """The middleware; `app` is the application that it guards."""

    def __init__(self, app: ASGIApp, rules: AccessRules, registry: CollectorRegistry) -> None:
        self._app = app
        self._rules = rules
        self._refused = Counter(
            "baton_http_unauthorized",
            "HTTP requests without the key that their path needs",
            ["door"],
            registry=registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, or pass the request on to the application."""
        if scope["type"] == "http":
            door = self._rules.door_of(scope["path"])
            if door is not Door.OPEN and not self._may_pass(scope, door):
                self._refused.labels(door.value).inc()
                has_keys = door is Door.API or bool(self._rules.admin)
                refusal = _unauthorized(door, has_keys)
                await error_response(refusal, scope["path"], None)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _may_pass(self, scope: Scope, door: Door) -> bool:
        return any(self._rules.admits(door, key) for key in _keys(scope))


def access_rules(settings: RouterSettings) -> AccessRules:
    """The access rules from the settings. Raises ConfigError."""
    return AccessRules(
        api=load_key_ring(settings.api_keys, settings.api_key_file),
        admin=load_key_ring(settings.admin_keys, settings.admin_key_file),
        supervisor=load_key_ring(filter(None, [settings.supervisor_key]), None),
        health=Door(settings.health_access),
        metrics=Door(settings.metrics_access),
    )


def warn_of_open_doors(settings: RouterSettings) -> None:
    """Log a warning if other hosts can reach the API without a key."""
    has_keys = bool(settings.api_keys) or settings.api_key_file is not None
    if not has_keys and not is_local(settings.host):
        log.warning(
            "the API on %s is open to everyone who can reach it: set BATON_API_KEYS or "
            "--api-key-file (docs/security.md)",
            settings.host,
        )


def is_local(host: str) -> bool:
    """Whether a listening address is reachable only from this host."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _keys(scope: Scope) -> Iterator[str]:
    """The request's keys, at most one from each header; a header sent twice is ignored."""
    bearers = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(bearers) == 1:
        scheme, _, key = bearers[0].partition(b" ")
        if scheme.lower() == _SCHEME:
            yield key.strip().decode("latin-1")
    plain = [value for name, value in scope["headers"] if name == b"x-api-key"]
    if len(plain) == 1:
        yield plain[0].strip().decode("latin-1")


def _unauthorized(door: Door, has_keys: bool) -> HttpError:
    kind = "an API key" if door is Door.API else "an operator's key"
    message = f"this needs {kind}, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
    if not has_keys:
        message += "; the router has none: set BATON_ADMIN_KEYS or --admin-key-file"
    return HttpError(
        status=_UNAUTHORIZED,
        message=message,
        kind=RequestError.kind,
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )
