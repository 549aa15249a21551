"""ASGI middleware that decides which requests of web pages the router accepts. It runs before the
check of API keys.

A page of any site can send requests to a router that its visitor's browser reaches, for example on
localhost. A page whose site's name was made to resolve to the router (DNS rebinding) even reads the
answers; its requests carry that name in `Host`. Requests of other pages are recognized by the
`Sec-Fetch-Site` and `Origin` headers, which a page cannot forge and clients that are not browsers
do not send. For these clients the check costs one pass over the headers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.anthropic_errors import error_response
from gateway.http.paths import PROBES
from gateway.settings import GatewaySettings
from http_kit.errors import HttpError
from process.sockets.host_names import is_address
from protocol.errors import RequestError

ANY = "*"
LOCALHOST = "localhost"
PREFLIGHT_AGE_S = 600

_HOST, _ORIGIN, _SITE = b"host", b"origin", b"sec-fetch-site"
_CROSS_SITE = b"cross-site"
_UNCHECKED_HOST = PROBES | {"/metrics"}
_PAGES = frozenset(("/", "/dashboard", "/dashboard/", "/docs"))
_EXPOSED = (b"x-request-id", b"request-id", b"traceparent", b"retry-after")
_OWN_PREFIX = b"x-baton-"
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9\-_, ]{1,1000}")


@dataclass(frozen=True)
class BrowserRules:
    """`hosts`: accepted names in `Host` besides IP addresses, in lower case and without port; None
    accepts any. `domains`: `.llm.example` accepts every name that ends so. `origins`: the sites
    whose pages may use the router; `*` is every site."""

    hosts: frozenset[bytes] | None = None
    domains: tuple[bytes, ...] = ()
    origins: frozenset[bytes] = frozenset()

    def is_host(self, value: bytes | None) -> bool:
        """Whether a `Host` header names this router."""
        if self.hosts is None or value is None:  # a browser always names a host
            return True
        host = value.strip().lower()
        name, colon, port = host.rpartition(b":")
        if colon and (port.isdigit() or not port):
            host = name
        host = host.removesuffix(b".")
        return (
            host in self.hosts or host.endswith(self.domains) or is_address(host.decode("latin-1"))
        )

    def is_origin(self, value: bytes) -> bool:
        """Whether pages of an origin may use this router."""
        return value in self.origins or ANY.encode() in self.origins


def browser_rules(settings: GatewaySettings) -> BrowserRules:
    """The rules from the settings. `Host` is checked if a list of names is given, and on a loopback
    address without API keys."""
    has_keys = bool(settings.api_keys) or settings.api_key_file is not None
    given = settings.allowed_hosts
    hosts, domains = None, frozenset[bytes]()
    if (given or not has_keys) and ANY not in given:
        domains = _lowered(each.removeprefix(ANY) for each in given if each.startswith(ANY))
        hosts = _lowered((LOCALHOST, settings.host, *given))
    return BrowserRules(hosts, tuple(domains), _lowered(settings.cors_origins))


class BrowserCheck:
    """The middleware around the application `app`."""

    def __init__(self, app: ASGIApp, rules: BrowserRules, registry: CollectorRegistry) -> None:
        self._app = app
        self._rules = rules
        self._refused = Counter(
            "baton_http_browsers_refused",
            "HTTP requests that were refused for the host or the site that they name",
            ["reason"],
            registry=registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 403 or a preflight, or pass the request on to the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        host, origin, site = headers.get(_HOST), headers.get(_ORIGIN), headers.get(_SITE)
        rules = self._rules
        if (
            rules.hosts is not None
            and scope["path"] not in _UNCHECKED_HOST
            and not rules.is_host(host)
        ):
            await self._refuse("host", _WRONG_HOST, scope, receive, send)
        elif origin is not None and rules.is_origin(origin):
            await self._answer_origin(origin, scope, receive, send)
        elif site == _CROSS_SITE and not _is_navigation(scope):
            await self._refuse("cross-site", _WRONG_SITE, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _answer_origin(
        self, origin: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        headers = dict(scope["headers"])
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            await _preflight(origin, headers)(scope, receive, send)
            return
        # The copy keeps the answer off the connection's own path, which bypasses `send`.
        await self._app(dict(scope), receive, _sharing(origin, send))

    async def _refuse(
        self, reason: str, refusal: HttpError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._refused.labels(reason).inc()
        await error_response(refusal, scope["path"], None)(scope, receive, send)


def _is_navigation(scope: Scope) -> bool:
    """Whether a user follows a link to one of the router's own pages."""
    if scope["path"] not in _PAGES or scope["method"] not in ("GET", "HEAD"):
        return False
    headers = dict(scope["headers"])
    is_frame = headers.get(b"sec-fetch-dest", b"document") != b"document"
    return headers.get(b"sec-fetch-mode") == b"navigate" and not is_frame


def _preflight(origin: bytes, headers: dict[bytes, bytes]) -> Response:
    """The answer to a browser that asks whether a page may send a request."""
    answer = Response(status_code=204)
    answer.raw_headers = [
        (b"access-control-allow-origin", origin),
        (b"access-control-allow-methods", b"GET, POST, DELETE"),
        (b"access-control-max-age", str(PREFLIGHT_AGE_S).encode()),
        (b"vary", b"origin"),
    ]
    names = headers.get(b"access-control-request-headers", b"")
    if _HEADER_NAMES.fullmatch(names) is not None:
        answer.raw_headers.append((b"access-control-allow-headers", names))
    if headers.get(b"access-control-request-private-network") == b"true":
        answer.raw_headers.append((b"access-control-allow-private-network", b"true"))
    return answer


def _sharing(origin: bytes, send: Send) -> Send:
    """A `send` that lets the page read the answer and Baton's own headers."""

    async def sharing_send(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            own = [name for name, _ in headers if name.lower().startswith(_OWN_PREFIX)]
            headers += [
                (b"access-control-allow-origin", origin),
                (b"access-control-expose-headers", b", ".join([*_EXPOSED, *own])),
                (b"vary", b"origin"),
            ]
            message = {**message, "headers": headers}
        await send(message)

    return sharing_send


def _lowered(names: Iterable[str]) -> frozenset[bytes]:
    return frozenset(name.lower().encode() for name in names)


def _refusal(message: str, code: str) -> HttpError:
    return HttpError(403, message, RequestError.kind, code=code)


_WRONG_HOST = _refusal(
    "the Host header is none of this router's names; its operator can add it to --allowed-hosts "
    "(BATON_ALLOWED_HOSTS); IP addresses and localhost need no entry",
    "host_not_allowed",
)
_WRONG_SITE = _refusal(
    "pages of other sites may not use this router; its operator can add the page's origin to "
    "--cors-origins",
    "origin_not_allowed",
)
