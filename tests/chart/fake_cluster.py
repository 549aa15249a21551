"""An API server that knows some objects and nothing else: enough for Helm's `lookup`."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from tests.chart.chart import NAMESPACE, Object

_GROUPS = {"v1": "/api/v1", "apps/v1": "/apis/apps/v1"}
_KINDS = {
    "v1": [("persistentvolumeclaims", "PersistentVolumeClaim")],
    "apps/v1": [("deployments", "Deployment")],
}


def live(kind: str, name: str, spec: Object) -> Object:
    """An object of the cluster."""
    (api_version,) = [each for each, kinds in _KINDS.items() if kind in dict(kinds).values()]
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec}


@contextmanager
def cluster_with(objects: Sequence[Object], folder: Path) -> Iterator[Path]:
    """A kubeconfig, in `folder`, of a cluster that has these objects."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(_answers(objects))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        path = folder / "kubeconfig"
        path.write_text(yaml.safe_dump(_kubeconfig(f"http://127.0.0.1:{server.server_port}")))
        try:
            yield path
        finally:
            server.shutdown()
            thread.join()


def _answers(objects: Sequence[Object]) -> dict[str, Any]:
    """The server's answers, by path."""
    answers: dict[str, Any] = {}
    for api_version, path in _GROUPS.items():
        resources = [
            {"name": plural, "kind": kind, "namespaced": True, "verbs": ["get"]}
            for plural, kind in _KINDS[api_version]
        ]
        answers[path] = {
            "kind": "APIResourceList", "groupVersion": api_version, "resources": resources,
        }  # fmt: skip
    for each in objects:
        plural = next(name for name, kind in _KINDS[each["apiVersion"]] if kind == each["kind"])
        where = f"{_GROUPS[each['apiVersion']]}/namespaces/{NAMESPACE}/{plural}"
        answers[f"{where}/{each['metadata']['name']}"] = each
    return answers


def _handler(answers: dict[str, Any]) -> type[BaseHTTPRequestHandler]:
    missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path.partition("?")[0])
            body = json.dumps(answer or missing | {"reason": "NotFound", "code": 404}).encode()
            self.send_response(200 if answer else 404)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    return Handler


def _kubeconfig(server: str) -> dict[str, Any]:
    named = {"name": "fake"}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "fake",
        "clusters": [named | {"cluster": {"server": server}}],
        "users": [named | {"user": {}}],
        "contexts": [named | {"context": {"cluster": "fake", "user": "fake"}}],
    }
