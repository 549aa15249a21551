"""Renderings of the chart by Helm's engine, as objects; each set of values is rendered once."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import yaml
from helm_python import Chart, HelmError, _native

from tests.paths import ROOT

CHART_FOLDER = ROOT / "deploy/helm/baton"
RELEASE, NAMESPACE = "demo", "ai"
OLDEST, NEWEST = "1.30.0", "1.37.0"
Object = dict[str, Any]


class RefusedError(Exception):
    """The schema or a template refused the values."""


@functools.cache
def chart() -> Chart:
    """The chart, loaded once per process."""
    return Chart.load(CHART_FOLDER)


def render(values: dict[str, Any], kube: str = NEWEST, **options: Any) -> dict[str, str]:
    """Files of the release by path, as `helm template` and `helm install` make them.

    The package's own `render` cannot name a version of Kubernetes; the call below it can. Raises
    RefusedError with Helm's message.
    """
    try:
        chart().validate_schema(values)
        chosen = {"kube_version": f"v{kube}", "name": RELEASE, "namespace": NAMESPACE, **options}
        rendered = _native.call_string(
            "helm_render", chart()._raw(), json.dumps(values), json.dumps(chosen)
        )
    except HelmError as error:
        raise RefusedError(str(error)) from error
    files: dict[str, str] = json.loads(rendered)
    return files


def parsed(files: dict[str, str]) -> list[Object]:
    """The objects in the files of a release."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [
        document
        for path, text in files.items()
        if path.endswith(".yaml")
        for document in yaml.load_all(text, loader)
        if document
    ]


@functools.cache
def _objects(values: str, kube: str) -> str:
    return json.dumps(parsed(render(json.loads(values), kube)))


def objects(values: dict[str, Any], kube: str = NEWEST) -> list[Object]:
    """All objects of a release with these values; the caller may change them."""
    found: list[Object] = json.loads(_objects(json.dumps(values), kube))
    return found


def of_kind(found: list[Object], kind: str) -> dict[str, Object]:
    """The objects of a kind by name, without the release's prefix."""
    return {
        each["metadata"]["name"].removeprefix(f"{RELEASE}-baton-"): each
        for each in found
        if each["kind"] == kind
    }


def pod_templates(found: list[Object]) -> Iterator[tuple[str, Object]]:
    """The pods of a release, as `Kind/name` and the pod (metadata and spec)."""
    for each in found:
        name = f"{each['kind']}/{each['metadata']['name']}"
        if each["kind"] == "Pod":
            yield name, each
        elif each["kind"] in ("Deployment", "StatefulSet", "DaemonSet", "Job"):
            yield name, each["spec"]["template"]
        elif each["kind"] == "LeaderWorkerSet":
            yield name, each["spec"]["leaderWorkerTemplate"]["workerTemplate"]


def is_secrets_job(pod: Object) -> bool:
    """Whether a pod is the one that makes the Secret."""
    return bool(pod["metadata"]["labels"]["app.kubernetes.io/component"] == "secrets")


def notes(values: dict[str, Any]) -> str:
    """What `helm install` prints."""
    return render(values)["baton/templates/NOTES.txt"]
