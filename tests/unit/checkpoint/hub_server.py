"""A stand-in of the Hugging Face hub: the few routes that a download takes, on loopback."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMITS = {"main": "a" * 40, "v1": "b" * 40}

Files = Mapping[str, Mapping[str, bytes]]
Answer = tuple[int, dict[str, str], bytes]
NOT_FOUND = 404, {"X-Error-Code": "RevisionNotFound"}, b'{"error": "Invalid rev id"}'


@contextmanager
def hub(
    repository: str, files: Files, cut: str = "", refusal: Answer | None = None
) -> Iterator[str]:
    """Serves `files` by commit and name as one repository; gives the endpoint's URL. Connections
    break off in the middle of the file `cut`; `refusal` answers everything."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            body = self._answer()
            is_cut = bool(cut) and self.path.endswith(cut)
            self.wfile.write(body[: len(body) // 2] if is_cut else body)

        def _answer(self) -> bytes:
            path = self.path.partition("?")[0]
            status, headers, body = refusal or answer(repository, files, path)
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            return body

        def log_message(self, *args: object) -> None:
            """Nothing is logged."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def answer(repository: str, files: Files, path: str) -> Answer:
    """Status, headers and body for a path."""
    api, _, revision = path.partition("/revision/")
    if api == f"/api/models/{repository}":
        commit = COMMITS.get(revision or "main", revision)
        return _info(repository, commit, files[commit]) if commit in files else NOT_FOUND
    api, _, revision = path.partition("/tree/")
    if api == f"/api/models/{repository}" and revision in files:
        return _tree(files[revision])
    place, _, name = path.removeprefix(f"/{repository}/resolve/").partition("/")
    if name in files.get(place, ()):
        content = files[place][name]
        return 200, {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": place}, content
    return NOT_FOUND


def _info(repository: str, commit: str, named: Mapping[str, bytes]) -> Answer:
    siblings = [{"rfilename": each} for each in named]
    body = {"id": repository, "sha": commit, "siblings": siblings}
    return 200, {"Content-Type": "application/json"}, json.dumps(body).encode()


def _tree(named: Mapping[str, bytes]) -> Answer:
    tree = [
        {"type": "file", "path": name, "size": len(content), "oid": _digest(content)}
        for name, content in named.items()
    ]
    return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
