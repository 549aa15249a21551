"""An API server that knows some Deployments and nothing else: enough for Helm's `lookup`."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

_GROUP = "/apis/apps/v1"


@contextmanager
def cluster_with(replicas: dict[str, int], folder: Path) -> Iterator[Path]:
    """A kubeconfig of a cluster in which Deployments of these names have so many replicas."""
    answers: dict[str, Any] = {
        "/version": {"major": "1", "minor": "37", "gitVersion": "v1.37.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": []},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
        _GROUP: {
            "kind": "APIResourceList",
            "groupVersion": "apps/v1",
            "resources": [
                {"name": "deployments", "kind": "Deployment", "namespaced": True, "verbs": ["get"]}
            ],
        },
    }
    for name, number in replicas.items():
        answers[f"{_GROUP}/namespaces/ai/deployments/{name}"] = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name, "namespace": "ai"},
            "spec": {"replicas": number},
        }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path.partition("?")[0])
            missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
            body = json.dumps(answer or missing | {"reason": "NotFound", "code": 404}).encode()
            self.send_response(200 if answer else 404)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        named = {"name": "fake"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [named | {"cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
            "users": [named | {"user": {}}],
            "contexts": [named | {"context": {"cluster": "fake", "user": "fake"}}],
        }
        path = folder / "kubeconfig"
        path.write_text(yaml.safe_dump(config))
        yield path
        server.shutdown()
        thread.join()
