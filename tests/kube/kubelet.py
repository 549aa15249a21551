"""The node: takes pods that have none, runs them, and keeps the table of host names.

Stands in for the scheduler, too: there is one node.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from tests.kube.api import Json, KubeApi, KubeError
from tests.kube.network import PodNetwork
from tests.kube.pod import PodRunner

NODE = "node-1"
REPORT_S = 20.0
POLL_S = 0.1

log = logging.getLogger(__name__)


class Kubelet:
    """Owns all pods of the cluster. Call `stop`."""

    def __init__(
        self, api: KubeApi, network: PodNetwork, folder: Path, images: Mapping[str, list[str]]
    ) -> None:
        self._api, self._network, self._images = api, network, images
        self._folder = folder
        self._hosts = folder / "hosts"
        self._runners: dict[str, PodRunner] = {}
        self._is_over = threading.Event()
        folder.mkdir(parents=True, exist_ok=True)
        self._hosts.write_text("127.0.0.1 localhost\n::1 localhost\n")
        self._register()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Kill all pods."""
        self._is_over.set()
        self._thread.join(10)
        for runner in self._runners.values():
            runner.abandon()

    def log_of(self, namespace: str, prefix: str) -> str:
        """What all containers of pods with this prefix wrote, for a failed test's message."""
        texts = []
        for path in sorted(self._folder.glob(f"pods/{namespace}/{prefix}*/containers/*/log")):
            texts.append(f"--- {path.parent.name} of {path.parts[-4]}\n{path.read_text()[-4000:]}")
        return "\n".join(texts)

    def _register(self) -> None:
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": NODE, "labels": {"kubernetes.io/hostname": NODE}},
        }
        self._api.call("POST", "/api/v1/nodes", node)
        self._report_node()

    def _report_node(self) -> None:
        """Say that the node is ready; without such reports the node controller gives it up, and
        marks its pods as not ready."""
        self._next_report = time.monotonic() + REPORT_S
        resources = {"cpu": "64", "memory": "64Gi", "pods": "110"}
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        status = {
            "capacity": resources,
            "allocatable": resources,
            "conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": now}],
            "addresses": [{"type": "InternalIP", "address": "10.97.0.1"}],
        }
        patch = "application/merge-patch+json"
        self._api.call("PATCH", f"/api/v1/nodes/{NODE}/status", {"status": status}, patch)

    def _run(self) -> None:
        while not self._is_over.wait(POLL_S):
            try:
                self._turn()
            except (KubeError, OSError) as error:
                log.error("%s", error)

    def _turn(self) -> None:
        if time.monotonic() >= self._next_report:
            self._report_node()
        pods = {each["metadata"]["uid"]: each for each in self._api.list("/api/v1/pods")}
        for uid, pod in pods.items():
            if uid in self._runners:
                self._runners[uid].pod = pod
            elif "nodeName" not in pod["spec"]:
                self._bind(pod)
            else:
                self._runners[uid] = self._start(pod)
        for uid in [each for each in self._runners if each not in pods]:
            runner = self._runners[uid]
            if runner.is_over:
                del self._runners[uid]
            elif "deletionTimestamp" not in runner.pod["metadata"]:  # deleted by force
                runner.pod["metadata"] |= {
                    "deletionTimestamp": "now", "deletionGracePeriodSeconds": 0,
                }  # fmt: skip
        self._write_hosts()

    def _start(self, pod: Json) -> PodRunner:
        metadata = pod["metadata"]
        folder = self._folder / "pods" / metadata["namespace"] / metadata["name"]
        if folder.exists():
            folder = folder.with_name(f"{folder.name}-{time.monotonic_ns()}")
        return PodRunner(self._api, pod, self._images, self._network, folder, self._hosts)

    def _bind(self, pod: Json) -> None:
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/binding"
        target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": metadata["name"]},
                   "target": target}  # fmt: skip
        self._api.call("POST", path, binding)

    def _write_hosts(self) -> None:
        """Names of services, as cluster DNS would resolve them; pods have the file mounted."""
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for service in self._api.list("/api/v1/services"):
            name, space = service["metadata"]["name"], service["metadata"]["namespace"]
            address = service["spec"].get("clusterIP", "None")
            addresses = [address]
            if address == "None":
                found = self._api.try_get(f"/api/v1/namespaces/{space}/endpoints/{name}") or {}
                addresses = [
                    each["ip"]
                    for subset in found.get("subsets", [])
                    for each in subset.get("addresses", [])
                ]
            for each in addresses:
                domain = f"{name}.{space}.svc"
                lines.append(f"{each} {name} {name}.{space} {domain} {domain}.cluster.local")
        text = "\n".join(lines) + "\n"
        if text != self._hosts.read_text():
            self._hosts.write_text(text)
