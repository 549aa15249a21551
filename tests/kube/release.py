"""A release of the chart on the test cluster: rendered by Helm, applied, pruned, hooks included.

The control plane is 1.20.2, older than what the chart supports. `adapted` maps what has moved since
to the versions that 1.20 serves, and takes out fields that it does not know; kinds that it lacks
are left out. Nothing else is changed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import yaml
from helm_python import Chart, Config

from tests.kube.api import Json
from tests.kube.cluster import Cluster
from tests.paths import ROOT

CHART = ROOT / "deploy/helm/baton"
HOOK, WEIGHT, POLICY = "helm.sh/hook", "helm.sh/hook-weight", "helm.sh/hook-delete-policy"
_MOVED = {
    ("policy/v1", "PodDisruptionBudget"): "policy/v1beta1",
    ("autoscaling/v2", "HorizontalPodAutoscaler"): "autoscaling/v2beta2",
}
_UNKNOWN_FIELDS = {
    "matchLabelKeys",
    "unhealthyPodEvictionPolicy",
    "endPort",
    "internalTrafficPolicy",
}
_ORDER = (
    "ServiceAccount", "Secret", "ConfigMap", "PersistentVolumeClaim", "Role", "RoleBinding",
    "Service", "NetworkPolicy", "PodDisruptionBudget", "Deployment", "StatefulSet", "DaemonSet",
)  # fmt: skip
_PRUNED = (
    ("apps/v1", "Deployment", "deployments"), ("apps/v1", "StatefulSet", "statefulsets"),
    ("v1", "Service", "services"),
    ("policy/v1beta1", "PodDisruptionBudget", "poddisruptionbudgets"),
)  # fmt: skip


class Release:
    """One release in one namespace. `left_out` are kinds that the cluster lacks."""

    def __init__(self, cluster: Cluster, namespace: str, name: str = "demo") -> None:
        self.cluster, self.namespace, self.name = cluster, namespace, name
        self.revision = 0
        self.left_out: set[str] = set()
        self._kubeconfig = cluster.control_plane.write_kubeconfig()

    def apply(self, values: Json) -> None:
        """Install the release, or upgrade it to these values; does not wait for the rollout."""
        self.revision += 1
        manifests = self.render(values)
        phase = "install" if self.revision == 1 else "upgrade"
        self._run_hooks(manifests, f"pre-{phase}")
        plain = [each for each in manifests if HOOK not in _annotations(each)]
        for manifest in sorted(plain, key=_rank):
            self._apply(manifest)
        self._prune(plain)
        self._run_hooks(manifests, f"post-{phase}")

    def run_tests(self, values: Json) -> str:
        """Run the chart's tests, as `helm test` does; returns what they wrote. Raises
        AssertionError if one fails."""
        for pod in self.render(values):
            if "test" in _annotations(pod).get(HOOK, "").split(","):
                self._run_hook(pod)
        return self.cluster.kubelet.log_of(self.namespace, f"{self.name}-baton-test")

    def render(self, values: Json) -> list[Json]:
        """All objects, with the cluster in sight."""
        config = Config(kubeconfig_path=self._kubeconfig, namespace=self.namespace)
        try:
            with Chart.load(CHART) as chart:
                chart.validate_schema(values)
                files = config.render(
                    chart, values, name=self.name, namespace=self.namespace,
                    revision=self.revision, is_install=self.revision <= 1,
                    is_upgrade=self.revision > 1,
                )  # fmt: skip
        finally:
            config.close()
        return [
            each
            for path, text in files.items()
            if path.endswith(".yaml")
            for each in yaml.safe_load_all(text)
            if each
        ]

    def uninstall(self) -> None:
        """Delete what `apply` applied."""
        self._prune(())

    def _apply(self, manifest: Json) -> None:
        fitting = adapted(manifest)
        if self.cluster.api.knows(fitting["apiVersion"], fitting["kind"]):
            self.cluster.api.apply(fitting, self.namespace)
        else:
            self.left_out.add(f"{manifest['apiVersion']} {manifest['kind']}")

    def _prune(self, kept: Iterable[Json]) -> None:
        names = {(each["kind"], each["metadata"]["name"]) for each in kept}
        for version, kind, plural in _PRUNED:
            base = f"/apis/{version}" if "/" in version else f"/api/{version}"
            path = f"{base}/namespaces/{self.namespace}/{plural}"
            selector = f"app.kubernetes.io/instance={self.name}"
            for found in self.cluster.api.list(path, labelSelector=selector):
                name = found["metadata"]["name"]
                if (kind, name) not in names:
                    self.cluster.api.delete(f"{path}/{name}")

    def _run_hooks(self, manifests: Iterable[Json], when: str) -> None:
        hooks = [e for e in manifests if when in _annotations(e).get(HOOK, "").split(",")]
        for hook in sorted(hooks, key=lambda e: (int(_annotations(e).get(WEIGHT, 0)), _rank(e))):
            self._run_hook(hook)
        for hook in hooks:
            if "hook-succeeded" in _annotations(hook).get(POLICY, ""):
                self._delete(hook)

    def _run_hook(self, hook: Json) -> None:
        if "before-hook-creation" in _annotations(hook).get(POLICY, "before-hook-creation"):
            self._delete(hook)
        self._apply(hook)
        if hook["kind"] not in ("Job", "Pod"):
            return
        path = self.cluster.api.path_of(hook, self.namespace)

        def end() -> str:
            status: Any = (self.cluster.api.try_get(path) or {}).get("status", {})
            if status.get("succeeded") or status.get("phase") == "Succeeded":
                return "succeeded"
            return "failed" if status.get("phase") == "Failed" or status.get("failed") else ""

        self.cluster.wait(end, f"the hook {hook['metadata']['name']}", 180)
        logs = self.cluster.kubelet.log_of(self.namespace, hook["metadata"]["name"])
        assert end() == "succeeded", logs

    def _delete(self, manifest: Json) -> None:
        path = self.cluster.api.path_of(adapted(manifest), self.namespace)
        self.cluster.api.delete(path)
        self.cluster.wait(lambda: self.cluster.api.try_get(path) is None, f"the end of {path}", 60)


def adapted(manifest: Json) -> Json:
    """The object for an API server of 1.20."""
    found: Json = _without(copy.deepcopy(manifest), _UNKNOWN_FIELDS)
    found["apiVersion"] = _MOVED.get((found["apiVersion"], found["kind"]), found["apiVersion"])
    return found


def _without(value: Any, names: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without(each, names) for key, each in value.items() if key not in names}
    return [_without(each, names) for each in value] if isinstance(value, list) else value


def _annotations(manifest: Json) -> dict[str, str]:
    return manifest["metadata"].get("annotations") or {}


def _rank(manifest: Json) -> int:
    kind = manifest["kind"]
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER)
