"""A release that serves the demo model: its values, and what tests ask of it."""

from __future__ import annotations

import base64
import copy
from typing import Any, Protocol

from tests.kube.api import Json
from tests.kube.cluster import Cluster, is_ready

SMALL = {"num_blocks": 600, "max_batch_size": 16}
VALUES: dict[str, Any] = {
    "requestTimeoutSeconds": 60,
    "podConditions": True,
    "router": {"lameDuckSeconds": 3},
    "workers": {
        "settings": SMALL,
        "resources": {"limits": {"cpu": "1", "memory": "2Gi"}, "requests": {"cpu": "1"}},
    },
    "pools": {
        "prefill": {"role": "prefill", "replicas": 1},
        "decode": {"role": "decode", "replicas": 2},
    },
}


class AnyRelease(Protocol):
    """A release that Helm or server-side apply brings to the cluster."""

    cluster: Cluster
    namespace: str
    name: str


def url_of(release: AnyRelease) -> str:
    """Where its Service is reached."""
    path = f"/api/v1/namespaces/{release.namespace}/services/{release.name}-baton"
    spec = release.cluster.api.call("GET", path)["spec"]
    return f"http://{spec['clusterIP']}:{spec['ports'][0]['port']}"


def key_of(release: AnyRelease, name: str = "api-keys") -> str:
    """A part of its Secret."""
    path = f"/api/v1/namespaces/{release.namespace}/secrets/{release.name}-baton-secrets"
    data = release.cluster.api.call("GET", path)["data"]
    return base64.b64decode(data[name]).decode()


def changed(values: Json, **settings: Any) -> Json:
    """The values with other settings of all workers: both pools roll."""
    found = copy.deepcopy(values)
    found["workers"]["settings"] |= settings
    return found


def names_of(release: AnyRelease, component: str) -> set[str]:
    """The ready pods of a release that are its routers, or its workers."""
    labels = f"app.kubernetes.io/instance={release.name}"
    selector = f"{labels},app.kubernetes.io/component={component}"
    pods = release.cluster.pods(release.namespace, selector)
    return {each["metadata"]["name"] for each in pods if is_ready(each)}
