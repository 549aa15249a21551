"""`baton kube-secret`: makes a fleet's secrets as a Kubernetes Secret, where there are none.

Runs in a pod, with the pod's own account, which needs `create`, `get` and `patch` of Secrets. Parts
that the Secret already has are never changed, so that upgrades and repeated runs keep all keys.
Missing parts are added.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import secrets
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.admission.api_keys import make_key
from process.settings import setting, settings_or_exit
from protocol.errors import ConfigError, ServiceError

PARTS: Mapping[str, Callable[[], str]] = {
    "cluster-secret": lambda: secrets.token_urlsafe(32),
    "store-password": lambda: secrets.token_hex(24),
    "api-keys": make_key,
    "admin-keys": make_key,
    "viewer-keys": make_key,
}
"""The keys of the Secret, and how each is made."""

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT_S = 30.0
_NOT_FOUND, _CONFLICT = 404, 409


@dataclass(frozen=True, kw_only=True)
class KubeSecretSettings:
    """Settings of `baton kube-secret`."""

    secret_name: str = setting(
        help="name of the Secret, in the pod's namespace", pattern=r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?"
    )
    account_dir: str = setting(
        str(ACCOUNT), help="folder with the account's token, ca.crt and namespace"
    )


def main(argv: Sequence[str]) -> int:
    """Make the missing parts, and print their names. Raises ConfigError and ServiceError."""
    settings = settings_or_exit(
        KubeSecretSettings,
        argv,
        prog="baton kube-secret",
        description="Create a Kubernetes Secret with a fleet's secrets, or what it lacks of them.",
    )
    cluster = ApiServer.of_pod(Path(settings.account_dir), os.environ)
    made = complete_secret(cluster, settings.secret_name)
    print(f"Secret {settings.secret_name}: " + (f"made {', '.join(made)}" if made else "complete"))
    return 0


def complete_secret(cluster: ApiServer, name: str) -> list[str]:
    """Create the Secret or add to it. Returns the parts that were made. Raises ServiceError."""
    found = cluster.read_secret(name)
    if found is None:
        made = _make(list(PARTS))
        if cluster.create_secret(name, made):
            return list(made)
        found = cluster.read_secret(name)  # another process was faster: its Secret counts
        if found is None:
            raise ServiceError(f"Secret {name} was made and deleted meanwhile: try again")
    made = _make([part for part in PARTS if not found.get(part)])
    if made:
        cluster.patch_secret(name, made)
    return list(made)


def _make(parts: Sequence[str]) -> dict[str, str]:
    return {part: base64.b64encode(PARTS[part]().encode()).decode() for part in parts}


@dataclass(frozen=True)
class ApiServer:
    """The few calls to the API server that this command needs."""

    host: str
    port: int
    namespace: str
    token: str
    tls: ssl.SSLContext

    @classmethod
    def of_pod(cls, account: Path, environ: Mapping[str, str]) -> ApiServer:
        """The API server of the pod that this process runs in. Raises ConfigError."""
        try:
            host, port = environ["KUBERNETES_SERVICE_HOST"], environ["KUBERNETES_SERVICE_PORT"]
            token = (account / "token").read_text().strip()
            namespace = (account / "namespace").read_text().strip()
            tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
        except (KeyError, OSError) as error:
            raise ConfigError(
                f"this command runs in a pod with its account's token mounted: {error}"
            ) from error
        return cls(host, int(port), namespace, token, tls)

    def read_secret(self, name: str) -> dict[str, str] | None:
        """The Secret's data, in base64; None if there is no such Secret."""
        status, answer = self._call("GET", f"/{name}")
        if status == _NOT_FOUND:
            return None
        self._must(status, answer, f"read Secret {name}")
        return answer.get("data") or {}

    def create_secret(self, name: str, data: Mapping[str, str]) -> bool:
        """Create the Secret; False if there is one by now."""
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "Opaque",
            "metadata": {
                "name": name,
                "labels": {"app.kubernetes.io/managed-by": "baton-kube-secret"},
            },
            "data": data,
        }
        status, answer = self._call("POST", "", body)
        if status == _CONFLICT:
            return False
        self._must(status, answer, f"create Secret {name}")
        return True

    def patch_secret(self, name: str, data: Mapping[str, str]) -> None:
        """Set some of the Secret's keys; the others stay."""
        status, answer = self._call("PATCH", f"/{name}", {"data": data})
        self._must(status, answer, f"complete Secret {name}")

    def _call(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPSConnection(
            self.host, self.port, timeout=_TIMEOUT_S, context=self.tls
        )
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        try:
            connection.request(
                method,
                f"/api/v1/namespaces/{self.namespace}/secrets{path}",
                None if body is None else json.dumps(body),
                {"Authorization": f"Bearer {self.token}", "Content-Type": kind},
            )
            response = connection.getresponse()
            answer = json.loads(response.read() or b"{}")
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServiceError(f"the API server at {self.host}:{self.port}: {error}") from error
        finally:
            connection.close()
        return response.status, answer if isinstance(answer, dict) else {}

    def _must(self, status: int, answer: Mapping[str, Any], what: str) -> None:
        if status >= 300:
            raise ServiceError(f"cannot {what}: {status} {answer.get('message', '')}".strip())
