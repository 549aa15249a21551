"""Events about this process's pod in Kubernetes, as `kubectl describe pod` shows them, and
conditions in its status.

A thread of its own writes both with the pod's service account, which needs only `create` of events,
and for conditions `patch` of pods/status. An Event that the API server refuses is logged and
dropped: nothing waits for Events. A condition is written again until it succeeds, because it would
be wrong until the next change.
"""

from __future__ import annotations

import datetime
import importlib
import logging
import queue
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from protocol.errors import ServiceError

log = logging.getLogger(__name__)

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
RETRY_S = 30.0
_TIMEOUT_S = 5.0
_MOST_CHARACTERS = 1024
_STRATEGIC = "application/strategic-merge-patch+json"
"""Merges a list of conditions by their types; other patches replace the list."""


class PodApi(Protocol):
    """The required calls of the API server. They raise ServiceError."""

    def create_event(self, namespace: str, body: dict[str, Any]) -> None:
        """Create an Event."""

    def patch_status(self, namespace: str, name: str, body: dict[str, Any]) -> None:
        """Merge `body` into a pod's status, lists by their keys."""


@dataclass(frozen=True)
class Pod:
    """The pod that Events are about."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True)
class _Condition:
    kind: str
    body: dict[str, Any]


class PodEvents:
    """Owns the thread. `close` waits for pending writes, for a few seconds at most."""

    def __init__(self, pod: Pod, api: PodApi, retry_s: float = RETRY_S) -> None:
        self._pod = pod
        self._api = api
        self._retry_s = retry_s
        self._queue: queue.SimpleQueue[dict[str, Any] | _Condition | None] = queue.SimpleQueue()
        self._unwritten: dict[str, _Condition] = {}  # by type
        self._thread = threading.Thread(target=self._run, name="baton-events", daemon=True)
        self._thread.start()

    def write(self, reason: str, text: str, is_warning: bool) -> None:
        """Write an Event soon. `reason` is one word in CamelCase."""
        self._queue.put(_body(self._pod, reason, text, "Warning" if is_warning else "Normal"))

    def set_condition(self, kind: str, is_true: bool, reason: str, text: str) -> None:
        """Set a condition of the pod soon; `kind` is its type, `reason` as in `write`. Call it only
        when the condition changes, or at the start."""
        self._queue.put(_Condition(kind, _status(self._pod, kind, is_true, reason, text)))

    def close(self) -> None:
        """End the thread."""
        self._queue.put(None)
        self._thread.join(2 * _TIMEOUT_S)

    def _run(self) -> None:
        while True:
            try:
                order = self._queue.get(timeout=self._retry_s if self._unwritten else None)
            except queue.Empty:
                for condition in list(self._unwritten.values()):
                    self._set(condition)
                continue
            if order is None:
                return
            if isinstance(order, _Condition):
                self._unwritten.pop(order.kind, None)
                self._set(order)
                continue
            try:
                self._api.create_event(self._pod.namespace, order)
            except ServiceError as error:
                log.warning("the Event %s was not written: %s", order["reason"], error)

    def _set(self, condition: _Condition) -> None:
        try:
            self._api.patch_status(self._pod.namespace, self._pod.name, condition.body)
        except ServiceError as error:
            if condition.kind not in self._unwritten:  # log the first failure only
                log.warning("the condition %s was not written yet: %s", condition.kind, error)
            self._unwritten[condition.kind] = condition
        else:
            self._unwritten.pop(condition.kind, None)


def pod_events(name: str | None, uid: str | None, account: Path = ACCOUNT) -> PodEvents | None:
    """Events of the pod with this name and uid; None outside of a pod. Without a token of the pod's
    account, or without the package `kubernetes`, None and a line in the log."""
    if not name or not uid:
        return None
    try:
        namespace = (account / "namespace").read_text().strip()
        api = _Client(account)
    except (ImportError, OSError, ServiceError) as error:
        log.warning("no Events of pod %s: %s", name, error)
        return None
    return PodEvents(Pod(namespace, name, uid), api)


class _Client:
    """The client of the package `kubernetes`, with the pod's account. Raises ImportError and
    ServiceError."""

    def __init__(self, account: Path) -> None:
        client = importlib.import_module("kubernetes.client")
        config = importlib.import_module("kubernetes.config")
        loader = importlib.import_module("kubernetes.config.incluster_config")
        self._api_error = client.ApiException
        self._http_error = importlib.import_module("urllib3.exceptions").HTTPError
        settings = client.Configuration()
        try:
            loader.InClusterConfigLoader(
                token_filename=str(account / "token"), cert_filename=str(account / "ca.crt")
            ).load_and_set(settings)
        except config.ConfigException as error:
            raise ServiceError(str(error)) from error
        settings.retries = False
        self._api = client.CoreV1Api(client.ApiClient(settings))

    def create_event(self, namespace: str, body: dict[str, Any]) -> None:
        """See PodApi."""
        self._call(self._api.create_namespaced_event, namespace, body)

    def patch_status(self, namespace: str, name: str, body: dict[str, Any]) -> None:
        """See PodApi."""
        patch = self._api.patch_namespaced_pod_status
        self._call(patch, name, namespace, body, _content_type=_STRATEGIC)

    def _call(self, function: Any, *arguments: Any, **options: Any) -> None:
        try:
            function(*arguments, _request_timeout=_TIMEOUT_S, **options)
        except self._api_error as error:
            raise ServiceError(f"{error.status} {error.reason}") from error
        except (self._http_error, OSError) as error:
            raise ServiceError(f"the API server: {error}") from error


def _status(pod: Pod, kind: str, is_true: bool, reason: str, text: str) -> dict[str, Any]:
    """A patch of the pod's status; the uid keeps it from another pod of the same name."""
    return {
        "metadata": {"uid": pod.uid},
        "status": {
            "conditions": [
                {
                    "type": kind,
                    "status": str(is_true),
                    "reason": reason,
                    "message": text[:_MOST_CHARACTERS],
                    "lastTransitionTime": _now(),
                }
            ]
        },
    }


def _body(pod: Pod, reason: str, text: str, kind: str) -> dict[str, Any]:
    """https://kubernetes.io/docs/reference/kubernetes-api/cluster-resources/event-v1/, in v1."""
    now = _now()
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


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
