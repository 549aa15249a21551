"""The few calls of Kubernetes' API that the tests need, as plain JSON objects.

https://kubernetes.io/docs/reference/using-api/api-concepts/ describes paths, patches and
server-side apply. Kinds are found by the server's own discovery.
"""

from __future__ import annotations

from typing import Any

import httpx

Json = dict[str, Any]
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
APPLY = "application/apply-patch+yaml"


class KubeError(Exception):
    """The API server refused a call; `status` is its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class KubeApi:
    """A client with one bearer token. May be used by several threads."""

    def __init__(self, url: str, token: str) -> None:
        self._client = httpx.Client(
            base_url=url,
            headers={"authorization": f"Bearer {token}"},
            verify=False,  # the server signs its own certificate; loopback of one namespace
            timeout=30,
        )
        self._resources: dict[tuple[str, str], Json] = {}

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def is_ready(self) -> bool:
        """Whether the API server answers."""
        return self._client.get("/readyz").status_code == 200

    def call(self, method: str, path: str, body: Any = None, kind: str | None = None) -> Json:
        """One call; returns the answer's object. Raises KubeError. What is only read is asked for
        again if the connection breaks."""
        headers = {"content-type": kind} if kind else {}
        for is_last in (method != "GET", False, True):
            try:
                response = self._client.request(method, path, json=body, headers=headers)
                break
            except httpx.TransportError:
                if is_last:
                    raise
        found: Json = response.json() if response.content else {}
        if response.status_code >= 400:
            raise KubeError(response.status_code, found.get("message", response.text))
        return found

    def list(self, path: str, **query: str) -> list[Json]:
        """The items of a list, such as `/api/v1/namespaces/x/pods`."""
        full = str(httpx.URL(path, params=query))
        items: list[Json] = self.call("GET", full)["items"]
        return items

    def try_get(self, path: str) -> Json | None:
        """An object, or None if there is none."""
        try:
            return self.call("GET", path)
        except KubeError as error:
            if error.status != 404:
                raise
            return None

    def apply(self, manifest: Json, namespace: str) -> Json:
        """Apply an object on the server's side, as `kubectl apply --server-side` does."""
        path = f"{self.path_of(manifest, namespace)}?fieldManager=helm&force=true"
        return self.call("PATCH", path, _with_protocols(manifest), APPLY)

    def delete(self, path: str, **options: Any) -> None:
        """Delete an object, if it is there; what it owns goes in the background."""
        body = {"propagationPolicy": "Background", **options}
        try:
            self.call("DELETE", path, body)
        except KubeError as error:
            if error.status != 404:
                raise

    def path_of(self, manifest: Json, namespace: str) -> str:
        """Where an object lies. Raises KeyError if the server does not know its kind."""
        resource = self._resource(manifest["apiVersion"], manifest["kind"])
        base = _base(manifest["apiVersion"])
        scope = ""
        if resource["namespaced"]:
            scope = f"/namespaces/{manifest['metadata'].get('namespace', namespace)}"
        return f"{base}{scope}/{resource['name']}/{manifest['metadata']['name']}"

    def knows(self, version: str, kind: str) -> bool:
        """Whether the server has this kind in this version."""
        try:
            self._resource(version, kind)
        except KeyError:
            return False
        return True

    def _resource(self, version: str, kind: str) -> Json:
        if (version, kind) not in self._resources:
            try:
                found = self.call("GET", _base(version))["resources"]
            except KubeError as error:
                raise KeyError(f"{version} {kind}") from error
            for each in found:
                if "/" not in each["name"]:
                    self._resources[version, each["kind"]] = each
        return self._resources[version, kind]


def _with_protocols(value: Any) -> Any:
    """The manifest with the protocol of every port, which 1.20's server-side apply does not add."""
    if isinstance(value, list):
        return [_with_protocols(each) for each in value]
    if not isinstance(value, dict):
        return value
    whole = {key: _with_protocols(each) for key, each in value.items()}
    ports = whole.get("ports")
    if isinstance(ports, list):
        whole["ports"] = [
            {"protocol": "TCP", **each} if {"port", "containerPort"} & set(each) else each
            for each in ports
        ]
    return whole


def _base(version: str) -> str:
    return f"/apis/{version}" if "/" in version else f"/api/{version}"
