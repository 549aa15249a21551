"""Probes of containers, with the periods and thresholds of the Pod's specification."""

from __future__ import annotations

import socket
import time

import httpx

from tests.kube.api import Json
from tests.kube.container import Container


class Probe:
    """One probe of one container; knows how often it succeeded or failed in a row."""

    def __init__(self, spec: Json, ports: dict[str, int], pod_ip: str) -> None:
        self._spec = spec
        self._ports = ports
        self._pod_ip = pod_ip
        self._next = time.monotonic() + spec.get("initialDelaySeconds", 0)
        self._successes = self._failures = 0
        self.last_failure = ""

    def is_due(self) -> bool:
        """Whether the next check is due; then call `check`."""
        return time.monotonic() >= self._next

    def check(self, container: Container) -> None:
        """Check once; takes up to the probe's timeout."""
        self._next = time.monotonic() + self._spec.get("periodSeconds", 10)
        self.last_failure = self._failure(container)
        if self.last_failure:
            self._failures, self._successes = self._failures + 1, 0
        else:
            self._failures, self._successes = 0, self._successes + 1

    @property
    def has_succeeded(self) -> bool:
        """As often in a row as its threshold asks for."""
        return self._successes >= self._spec.get("successThreshold", 1)

    @property
    def has_failed(self) -> bool:
        """As often in a row as its threshold asks for."""
        return self._failures >= self._spec.get("failureThreshold", 3)

    def _failure(self, container: Container) -> str:
        """Why it failed; "" if it did not."""
        timeout = self._spec.get("timeoutSeconds", 1)
        if "exec" in self._spec:
            code = container.run(self._spec["exec"]["command"], timeout)
            return f"exit code {code}" if code else ""
        if "httpGet" in self._spec:
            return http_get(self._spec["httpGet"], self._ports, self._pod_ip, timeout)
        port = _port(self._spec["tcpSocket"]["port"], self._ports)
        try:
            socket.create_connection((self._pod_ip, port), timeout).close()
        except OSError as error:
            return str(error)
        return ""


def http_get(action: Json, ports: dict[str, int], pod_ip: str, timeout_s: float) -> str:
    """Why a GET of a probe or hook failed; "" if it did not."""
    scheme, port = action.get("scheme", "HTTP").lower(), _port(action["port"], ports)
    url = f"{scheme}://{action.get('host', pod_ip)}:{port}{action.get('path', '/')}"
    headers = {each["name"]: each["value"] for each in action.get("httpHeaders", [])}
    try:
        found = httpx.get(url, headers=headers, timeout=timeout_s, verify=False)
    except httpx.HTTPError as error:
        return f"{url}: {error}"
    return "" if 200 <= found.status_code < 400 else f"{url}: {found.status_code} {found.text:.200}"


def _port(port: int | str, ports: dict[str, int]) -> int:
    return port if isinstance(port, int) else ports[port]
