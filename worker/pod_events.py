"""Events about this process's pod in Kubernetes, as `kubectl describe pod` shows them.

Written from a thread of its own, by the pod's service account, which needs nothing but `create` of
events. What the API server refuses is logged and lost: an Event is never worth waiting for.
"""

from __future__ import annotations

import datetime
import importlib
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import ServiceError

log = logging.getLogger(__name__)

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT_S = 5.0
_MOST_CHARACTERS = 1024

Post = Callable[[str, dict[str, Any]], None]
"""Creates an Event, given its namespace and body. Raises ServiceError."""


@dataclass(frozen=True)
class Pod:
    """The pod that Events are about."""

    namespace: str
    name: str
    uid: str


class PodEvents:
    """Owns the thread. `close` waits for Events that are under way, for a few seconds at most."""

    def __init__(self, pod: Pod, post: Post) -> None:
        self._pod = pod
        self._post = post
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="baton-events", daemon=True)
        self._thread.start()

    def write(self, reason: str, text: str, is_warning: bool) -> None:
        """Write an Event soon. `reason` is one word in capitals and small letters."""
        self._queue.put(_body(self._pod, reason, text, "Warning" if is_warning else "Normal"))

    def close(self) -> None:
        """End the thread."""
        self._queue.put(None)
        self._thread.join(2 * _TIMEOUT_S)

    def _run(self) -> None:
        while (body := self._queue.get()) is not None:
            try:
                self._post(self._pod.namespace, body)
            except ServiceError as error:
                log.warning("the Event %s was not written: %s", body["reason"], error)


def pod_events(name: str | None, uid: str | None, account: Path = ACCOUNT) -> PodEvents | None:
    """Events of the pod with this name and uid; None outside of a pod. If the pod has no token of
    its account, or the package `kubernetes` is missing, the log says so."""
    if not name or not uid:
        return None
    try:
        namespace = (account / "namespace").read_text().strip()
        post = _by_client(account)
    except (ImportError, OSError, ServiceError) as error:
        log.warning("no Events of pod %s: %s", name, error)
        return None
    return PodEvents(Pod(namespace, name, uid), post)


def _by_client(account: Path) -> Post:
    """A `Post` by Kubernetes' own client. Raises ImportError and ServiceError."""
    client = importlib.import_module("kubernetes.client")
    config = importlib.import_module("kubernetes.config")
    loader = importlib.import_module("kubernetes.config.incluster_config")
    http_error = importlib.import_module("urllib3.exceptions").HTTPError
    settings = client.Configuration()
    try:
        loader.InClusterConfigLoader(
            token_filename=str(account / "token"), cert_filename=str(account / "ca.crt")
        ).load_and_set(settings)
    except config.ConfigException as error:
        raise ServiceError(str(error)) from error
    settings.retries = False
    api = client.CoreV1Api(client.ApiClient(settings))

    def post(namespace: str, body: dict[str, Any]) -> None:
        try:
            api.create_namespaced_event(namespace, body, _request_timeout=_TIMEOUT_S)
        except client.ApiException as error:
            raise ServiceError(f"{error.status} {error.reason}") from error
        except (http_error, OSError) as error:
            raise ServiceError(f"the API server: {error}") from error

    return post


def _body(pod: Pod, reason: str, text: str, kind: str) -> dict[str, Any]:
    """https://kubernetes.io/docs/reference/kubernetes-api/cluster-resources/event-v1/, in v1."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "metadata": {"generateName": f"{pod.name[:200]}.", "namespace": pod.namespace},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "namespace": pod.namespace,
            "name": pod.name,
            "uid": pod.uid,
        },
        "reason": reason,
        "message": text[:_MOST_CHARACTERS],
        "type": kind,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
        "source": {"component": "baton"},
    }
