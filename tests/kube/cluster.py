"""A whole cluster of one node: network, control plane, kubelet and service proxy."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.kube.api import Json, KubeApi
from tests.kube.control_plane import ControlPlane
from tests.kube.kubelet import Kubelet
from tests.kube.network import PodNetwork
from tests.kube.services import ServiceProxy


class Cluster:
    """Owns everything. Call `stop`. Must run in network and mount namespaces of its own."""

    def __init__(self, binaries: Path, folder: Path, images: Mapping[str, list[str]]) -> None:
        network = PodNetwork()
        self.control_plane = ControlPlane(binaries, folder / "control-plane")
        self.api: KubeApi = self.control_plane.start()
        self.kubelet = Kubelet(self.api, network, folder / "node", images)
        self.services = ServiceProxy(self.api)

    def stop(self) -> None:
        """End all pods, then the control plane."""
        self.kubelet.stop()
        self.services.stop()
        self.api.close()
        self.control_plane.stop()

    def make_namespace(self, name: str) -> str:
        """A namespace whose service account is there."""
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        self.api.call("POST", "/api/v1/namespaces", body)
        account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
        self.wait(lambda: (self.api.try_get(account) or {}).get("secrets"), "a service account")
        return name

    def pods(self, namespace: str, selector: str = "") -> list[Json]:
        """The pods of a namespace, by labels."""
        path = f"/api/v1/namespaces/{namespace}/pods"
        return self.api.list(path, labelSelector=selector)

    def wait(self, condition: Callable[[], object], what: str, timeout_s: float = 120.0) -> None:
        """Wait until it holds. Raises AssertionError in time-out."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {timeout_s:g} s in vain for {what}")
            time.sleep(0.1)

    def wait_for_rollout(self, namespace: str, timeout_s: float = 240.0) -> None:
        """Wait until every Deployment and StatefulSet of a namespace runs its newest revision."""

        def is_done() -> bool:
            base = f"/apis/apps/v1/namespaces/{namespace}"
            deployments = self.api.list(f"{base}/deployments")
            stateful = self.api.list(f"{base}/statefulsets")
            return all(_is_rolled_out(each) for each in (*deployments, *stateful))

        try:
            self.wait(is_done, "a rollout", timeout_s)
        except AssertionError as error:
            states = [
                (each["metadata"]["name"], each["status"].get("message"),
                 [(c["name"], c["ready"], c["restartCount"], c["state"])
                  for c in each["status"].get("containerStatuses", [])])
                for each in self.pods(namespace)
            ]  # fmt: skip
            logs = self.kubelet.log_of(namespace, "")
            raise AssertionError(f"{error}: {states}\n{logs}") from None


def is_ready(pod: Json) -> bool:
    """Whether a pod is ready and is not being deleted."""
    conditions = pod["status"].get("conditions", [])
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]


def _is_rolled_out(workload: Json) -> bool:
    wanted, status = workload["spec"].get("replicas", 1), workload.get("status", {})
    return (
        status.get("observedGeneration", 0) >= workload["metadata"]["generation"]
        and status.get("updatedReplicas", 0) == wanted
        and status.get("readyReplicas", 0) == wanted
        and status.get("replicas", 0) == wanted
    )
