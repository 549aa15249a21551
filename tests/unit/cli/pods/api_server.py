"""The part of a Kubernetes API server that serves Secrets and takes Events and statuses of pods,
over real TLS on loopback."""

from __future__ import annotations

import base64
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import trustme

TOKEN, NAMESPACE = "the-account's-token", "ai"
ROOT = f"/api/v1/namespaces/{NAMESPACE}/secrets"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods/"
EVENTS = f"/api/v1/namespaces/{NAMESPACE}/events"


class SecretsServer(ThreadingHTTPServer):
    """Keeps Secrets by name, as text; `verbs` are those that the account may use."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.secrets: dict[str, dict[str, str]] = {}
        self.verbs = {"GET", "POST", "PATCH"}
        self.calls: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.statuses: list[tuple[str, str, dict[str, Any]]] = []
        """Patches of pods' statuses: name, content type, body."""
        self.rival: dict[str, str] | None = None
        """What someone else creates just before our POST."""


class _Handler(BaseHTTPRequestHandler):
    server: SecretsServer

    def _serve(self) -> None:
        server = self.server
        server.calls.append(self.command)
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        scheme, _, token = self.headers["Authorization"].partition(" ")
        is_known = (scheme.lower(), token) == ("bearer", TOKEN)
        if not is_known or self.command not in server.verbs:
            self._answer(403, {"message": "secrets is forbidden"})
        elif self.command == "POST" and self.path == EVENTS:
            server.events.append(body)
            self._answer(201, body)
        elif self.command == "PATCH" and self.path.startswith(PODS):
            name, _, part = self.path.removeprefix(PODS).partition("/")
            assert part == "status"
            server.statuses.append((name, self.headers["Content-Type"], body))
            self._answer(200, {"kind": "Pod"})
        elif self.command == "POST":
            assert self.path == ROOT
            name = body["metadata"]["name"]
            if server.rival is not None:
                server.secrets[name] = server.rival
            if name in server.secrets:
                self._answer(409, {"message": "already exists"})
            else:
                server.secrets[name] = _plain(body["data"])
                self._answer(201, body)
        else:
            name = self.path.removeprefix(f"{ROOT}/")
            if name not in server.secrets:
                self._answer(404, {"message": "not found"})
                return
            if self.command == "PATCH":
                assert self.headers["Content-Type"] == "application/merge-patch+json"
                server.secrets[name] |= _plain(body["data"])
            data = {
                key: base64.b64encode(value.encode()).decode()
                for key, value in server.secrets[name].items()
            }
            self._answer(200, {"data": data})

    do_GET = do_POST = do_PATCH = _serve

    def _answer(self, status: int, document: dict[str, Any]) -> None:
        payload = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: object) -> None:
        pass


def _plain(data: dict[str, str]) -> dict[str, str]:
    return {key: base64.b64decode(value).decode() for key, value in data.items()}


@contextmanager
def secrets_server(account: Path) -> Iterator[SecretsServer]:
    """A running server; `account` gets the files that a pod finds."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(account / "ca.crt"))
    (account / "token").write_text(TOKEN)
    (account / "namespace").write_text(NAMESPACE)
    with SecretsServer() as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
