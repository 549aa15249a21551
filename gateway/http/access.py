"""ASGI middleware around the application: which key opens which path, and the 401 for a request
without that key.

- Paths under `/v1/` and vLLM's helpers need API keys, as do unknown paths that stand for one of
  them.
- The operator chooses for probes and `/metrics`.
- The API's description and the dashboard's files are open.
- Pages and data for operators need a viewer's or an admin key.
- Every other path needs an admin key, so that a new path is closed by default.

A key comes as a bearer token or in `x-api-key`. Without any keys all paths are open, except those
that change the fleet: they always need an admin key. Keys are looked up once a request, and never
on open paths. Knows only hashes of keys, and never repeats what a client sent.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.admission.api_keys import KeyRing
from gateway.admission.key_files import KeyFiles
from gateway.http.anthropic_errors import error_response
from gateway.http.paths import (
    CONTROL_PREFIX,
    DOCUMENTS,
    PROBES,
    RECEIPT,
    VIEWED,
    VIEWED_PREFIX,
    is_of_api,
    is_page,
    meant_path,
)
from gateway.settings import GatewaySettings
from http_kit.caller import CALLER, KEY_NAME, Caller, digest_of
from http_kit.errors import HttpError
from http_kit.tenant import EVERYBODY, KeyTerms, tenant_of
from process.sockets.host_names import is_loopback
from protocol.errors import RequestError

log = logging.getLogger(__name__)

_UNAUTHORIZED = 401
_SCHEME = b"bearer"


class Door(enum.Enum):
    """The kind of key that a path needs."""

    OPEN = "open"
    API = "api"
    VIEWER = "viewer"
    ADMIN = "admin"
    CONTROL = "control"


@dataclass(frozen=True, slots=True)
class FoundKey:
    """A key that opens a door, its terms, and its name in logs."""

    key: str
    terms: KeyTerms
    name: str


@dataclass(frozen=True)
class AccessRules:
    """The keys of each door, and the doors of the probes and of `/metrics`.

    Viewers' keys open what operators read; admin keys open that and the controls. `supervisor`
    opens the same paths as admin keys, but does not count as a key that closes paths: the process
    that started the router always has it, even if the operator sets no keys. Digests of callers are
    salted with `salt`.
    """

    api: KeyRing = field(default_factory=KeyRing)
    admin: KeyRing = field(default_factory=KeyRing)
    viewer: KeyRing = field(default_factory=KeyRing)
    supervisor: KeyRing = field(default_factory=KeyRing)
    salt: bytes = field(default=b"", repr=False)
    health: Door = Door.OPEN
    metrics: Door = Door.VIEWER

    def door_of(self, path: str) -> Door:
        """The door of a path. Setting API keys also closes operators' paths; setting operators'
        keys closes no path of the API."""
        door = Door.ADMIN
        if path.startswith(CONTROL_PREFIX):
            return Door.CONTROL
        if is_of_api(path):
            door = Door.API
        elif path in PROBES:
            door = self.health
        elif path == "/metrics":
            door = self.metrics
        elif path in DOCUMENTS or is_page(path):
            door = Door.OPEN
        elif path in VIEWED or path.startswith(VIEWED_PREFIX):
            door = Door.VIEWER
        elif meant_path(path) is not None:
            door = Door.API  # the answer is a 404 that suggests a path of the API
        if not self.api and (door is Door.API or not (self.admin or self.viewer)):
            return Door.OPEN
        return door

    def find(self, door: Door, keys: Iterable[str]) -> FoundKey | None:
        """The first of `keys` that opens a closed door."""
        operators = (("", self.admin), ("supervisor's ", self.supervisor))
        rings: Sequence[tuple[str, KeyRing]] = operators
        if door is Door.API:
            rings = (("", self.api),)
        elif door is Door.VIEWER:
            rings = (*operators, ("", self.viewer))
        for key in keys:
            for kind, ring in rings:
                stored = ring.find(key)
                if stored is not None:
                    return FoundKey(key, stored.terms, f"{kind}{stored.terms.name}")
        return None

    def has_operators(self, door: Door) -> bool:
        """Whether an operator has a key for this door."""
        return bool(self.admin) or (door is Door.VIEWER and bool(self.viewer))


class KeyCheck:
    """The middleware around the application `app`."""

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
            path: str = scope["path"]
            door = self._rules.door_of(path)
            has_caller = door is not Door.OPEN or is_of_api(path)
            if has_caller and not self._admit(scope, door):
                self._refused.labels(door.value).inc()
                has_keys = door is Door.API or self._rules.has_operators(door)
                refusal = _unauthorized(door, any(_keys(scope)), has_keys)
                await error_response(refusal, path, None)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope, door: Door) -> bool:
        """Whether a request may pass. Writes its caller to its scope, if the path depends on the
        caller. Looks up each of its keys once, and only for the doors of the path."""
        rules, keys = self._rules, _keys(scope)
        if door is Door.OPEN and not keys:
            return True
        found = None if door is Door.OPEN else rules.find(door, keys)
        if door is not Door.OPEN and door is not Door.API:
            if found is not None:
                scope[KEY_NAME] = found.name
            return found is not None
        is_admin = (
            RECEIPT.fullmatch(scope["path"]) is not None
            and rules.find(Door.ADMIN, keys) is not None
        )
        if door is Door.API and found is None and not is_admin:
            return False
        if keys:
            tenant = EVERYBODY if found is None else tenant_of(found.key, found.terms, rules.salt)
            scope[CALLER] = Caller(digest_of(keys[0], rules.salt), is_admin, tenant)
        return True


def access_rules(settings: GatewaySettings, files: KeyFiles) -> AccessRules:
    """The access rules from the settings; `files` updates them from the key files. Raises
    ConfigError."""
    return AccessRules(
        api=files.ring(settings.api_keys, settings.api_key_file, has_terms=True),
        admin=files.ring(settings.admin_keys, settings.admin_key_file),
        viewer=files.ring(settings.viewer_keys, settings.viewer_key_file),
        supervisor=files.ring(filter(None, [settings.supervisor_key]), None),
        salt=settings.cluster_secret.encode(),
        health=Door(settings.health_access),
        metrics=Door(settings.metrics_access),
    )


def warn_of_open_doors(settings: GatewaySettings) -> None:
    """Log a warning if other hosts can reach the API without a key."""
    has_keys = bool(settings.api_keys) or settings.api_key_file is not None
    if not has_keys and not is_loopback(settings.host):
        log.warning(
            "the API on %s is open to everyone who can reach it: set BATON_API_KEYS or "
            "--api-key-file (docs/security.md); it answers under IP addresses, localhost and the "
            "names of --allowed-hosts only",
            settings.host,
        )


def _keys(scope: Scope) -> list[str]:
    """The request's keys, at most one from each header; a header sent twice is ignored."""
    given = dict(scope["headers"])
    if b"authorization" not in given and b"x-api-key" not in given:
        return []
    bearers: list[bytes] = []
    plain: list[bytes] = []
    for name, value in scope["headers"]:
        if name == b"authorization":
            bearers.append(value)
        elif name == b"x-api-key":
            plain.append(value)
    keys = []
    if len(bearers) == 1:
        scheme, _, key = bearers[0].partition(b" ")
        if scheme.lower() == _SCHEME:
            keys.append(key.strip().decode("latin-1"))
    if len(plain) == 1:
        keys.append(plain[0].strip().decode("latin-1"))
    return keys


_KINDS = {Door.API: "an API key", Door.CONTROL: "an admin key"}


def _unauthorized(door: Door, sends_key: bool, has_keys: bool) -> HttpError:
    kind = _KINDS.get(door, "an operator's key")
    message = f"this needs {kind}, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
    if sends_key:
        message = f"this needs {kind}, and the key that was sent is not one, or was revoked"
    if not has_keys:
        message += "; the router has none: set BATON_ADMIN_KEYS or --admin-key-file"
    return HttpError(
        status=_UNAUTHORIZED,
        message=message,
        kind=RequestError.kind,
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )
