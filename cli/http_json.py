"""Small HTTP requests to a router for operators' commands, with the standard library.

All text of the router is made harmless for a terminal, errors included. Requests to loopback use no
proxy, others those that the environment names (`http_proxy`, `https_proxy`, `no_proxy`).
"""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from cli.output.terminal_text import shown, shown_json
from process.sockets.host_names import is_loopback
from protocol.addresses import parsed_address, shown_address
from protocol.errors import ConfigError, ServiceError


class RouterUnreachable(ServiceError):
    """No router answers at the URL."""


@dataclass(frozen=True)
class RouterAccess:
    """How to access a router: the key to send, and the certificate to trust.

    `cert_file` is the router's own PEM file, which is trusted for any host name. Without it, an
    https router must have a certificate that this host trusts. `is_here` says that the router runs
    on this host, whatever its address.
    """

    key: str | None = field(default=None, repr=False)
    cert_file: str | None = None
    is_here: bool = False

    def open(self, request: urllib.request.Request, timeout_s: float) -> Any:
        """The response, a context manager. Raises as `urlopen` does."""
        if self.key is not None:
            request.add_unredirected_header("Authorization", f"Bearer {self.key}")
        handlers: list[urllib.request.BaseHandler] = []
        if (context := self._tls()) is not None:
            handlers.append(urllib.request.HTTPSHandler(context=context))
        if self.is_here or is_loopback(urlsplit(request.full_url).hostname or ""):
            handlers.append(urllib.request.ProxyHandler({}))
        return urllib.request.build_opener(*handlers).open(request, timeout=timeout_s)

    def _tls(self) -> ssl.SSLContext | None:
        """The TLS context; None for the default one. Raises ConfigError."""
        if self.cert_file is None:
            return None
        try:
            context = ssl.create_default_context(cafile=self.cert_file)
        except OSError as error:  # includes ssl.SSLError
            raise ConfigError(f"certificate {self.cert_file}: {error}") from error
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return context


OPEN_ACCESS = RouterAccess()


def router_root(url: str) -> str:
    """A router's address without the `/v1` that OpenAI's clients need at its end."""
    return url.rstrip("/").removesuffix("/v1")


def get_json(url: str, timeout_s: float = 5.0, access: RouterAccess = OPEN_ACCESS) -> Any:
    """The JSON answer to a GET. Raises ServiceError, or RouterUnreachable without an answer."""
    return _json(_request(url), timeout_s, access)


def post_json(
    url: str,
    body: Mapping[str, Any],
    timeout_s: float = 60.0,
    access: RouterAccess = OPEN_ACCESS,
    headers: Mapping[str, str] | None = None,
) -> Any:
    """The JSON answer to a POST of JSON. Raises as `get_json` does."""
    sent = {"Content-Type": "application/json", **(headers or {})}
    return _json(_request(url, json.dumps(body).encode(), sent), timeout_s, access)


@contextmanager
def reading_answers(url: str) -> Iterator[None]:
    """A context that uses a router's answers. Raises ServiceError where one lacks what routers of
    this version answer, because the router has another version or something else answers there."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ServiceError(
            f"{shown_address(url)} does not answer as routers of this version do: is it one? "
            f"({error!r})"
        ) from error


def _request(
    url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> urllib.request.Request:
    """A request to a router. Raises ConfigError for a malformed URL. The error leaves out the URL,
    which may hold a password."""
    parts = parsed_address(url)
    if parts is None or parts.scheme not in ("http", "https"):
        raise ConfigError("the router's URL is malformed: give http://host:port or https://host")
    if parts.username is not None:
        raise ConfigError(
            f"the URL {shown_address(url)} has a user part, which routers do not know: they take "
            "keys, as in BATON_ADMIN_KEY"
        )
    return urllib.request.Request(url, body, dict(headers or {}))


def _json(request: urllib.request.Request, timeout_s: float, access: RouterAccess) -> Any:
    url = shown_address(request.full_url)
    try:
        with access.open(request, timeout_s) as response:
            return shown_json(json.load(response))
    except urllib.error.HTTPError as error:
        with error:
            content = error.read().decode(errors="replace").strip()
        detail = error_message(content) or content
        raise ServiceError(shown(f"{url} answers {error.code}: {detail[:500]}")) from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise RouterUnreachable(shown(f"no router answers at {url}: {reason}")) from error
    except ValueError as error:
        raise ServiceError(f"{url} does not answer with JSON: is it a router?") from error


def error_message(content: str) -> str | None:
    """The message of a body in OpenAI's error shape; None for any other body."""
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return None


def is_ok(url: str, timeout_s: float = 2.0, access: RouterAccess = OPEN_ACCESS) -> bool:
    """Whether a GET is answered with 200."""
    try:
        with access.open(_request(url), timeout_s) as response:
            return bool(response.status == 200)
    except urllib.error.HTTPError as error:
        error.close()
        return False
    except (OSError, http.client.HTTPException):
        return False
