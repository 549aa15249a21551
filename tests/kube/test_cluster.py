"""The test cluster itself: real controllers, and pods that behave as pods do."""

from __future__ import annotations

import itertools
from typing import Any

import httpx
import pytest

from tests.kube.api import Json, KubeError
from tests.kube.cluster import Cluster, is_ready

pytestmark = pytest.mark.kube
_numbers = itertools.count()

SERVER = """
import http.server, os, signal, sys, time
NAME = os.environ["HOSTNAME"]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = (NAME + " " + os.environ.get("COLOUR", "")).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *arguments): pass
server = http.server.ThreadingHTTPServer(("", 8000), Handler)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
server.serve_forever()
"""


@pytest.fixture
def namespace(cluster: Cluster) -> str:
    return cluster.make_namespace(f"t{next(_numbers)}")


def deployment(name: str, replicas: int, **container: Any) -> Json:
    labels = {"app": name}
    main = {
        "name": "main",
        "image": "local/python:1",
        "args": ["-c", SERVER],
        "ports": [{"name": "http", "containerPort": 8000}],
        "readinessProbe": {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1},
        **container,
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [main]}},
        },
    }


def service(name: str) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": {"app": name}, "ports": [{"port": 80, "targetPort": 8000}]},
    }


def address_of(cluster: Cluster, namespace: str, name: str) -> str:
    found = cluster.api.call("GET", f"/api/v1/namespaces/{namespace}/services/{name}")
    return str(found["spec"]["clusterIP"])


def test_a_deployment_behind_a_service_answers_through_ready_pods(
    cluster: Cluster, namespace: str
) -> None:
    cluster.api.apply(deployment("web", 2), namespace)
    cluster.api.apply(service("web"), namespace)
    cluster.wait_for_rollout(namespace)
    url = f"http://{address_of(cluster, namespace, 'web')}"
    pods = {each["metadata"]["name"] for each in cluster.pods(namespace, "app=web")}
    cluster.wait(lambda: _answers(url), "the service")
    assert {httpx.get(url).text.split()[0] for _ in range(40)} == pods


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=1).status_code == 200
    except httpx.TransportError:
        return False


def test_pods_have_the_user_and_the_file_system_that_they_ask_for(
    cluster: Cluster, namespace: str
) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"},
              "stringData": {"key": "word"}}  # fmt: skip
    cluster.api.apply(secret, namespace)
    script = (
        "import os; assert os.getuid() == 1001; assert open('/etc/test/key').read() == 'word';"
        "assert os.environ['KEY'] == 'word'; open('/tmp/scratch', 'w').write('x')\n"
        "try: open('/new', 'w')\n"
        "except OSError as error: assert error.errno == 30, error\n"
        "else: raise AssertionError('the root file system is writable')\n"
        "assert os.statvfs('/dev/shm').f_blocks * 4096 <= 64 << 20\n"
    )
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "once"},
        "spec": {
            "restartPolicy": "Never",
            "securityContext": {"runAsUser": 1001, "runAsGroup": 1001},
            "volumes": [{"name": "s", "secret": {"secretName": "s"}},
                        {"name": "tmp", "emptyDir": {}}],
            "containers": [{
                "name": "main", "image": "python", "args": ["-c", script],
                "env": [{"name": "KEY",
                         "valueFrom": {"secretKeyRef": {"name": "s", "key": "key"}}}],
                "securityContext": {"readOnlyRootFilesystem": True,
                                    "allowPrivilegeEscalation": False,
                                    "capabilities": {"drop": ["ALL"]}},
                "volumeMounts": [{"name": "s", "mountPath": "/etc/test", "readOnly": True},
                                 {"name": "tmp", "mountPath": "/tmp"}],
            }],
        },
    }  # fmt: skip
    cluster.api.apply(pod, namespace)
    path = f"/api/v1/namespaces/{namespace}/pods/once"

    def phase() -> str:
        return str(cluster.api.call("GET", path)["status"].get("phase"))

    cluster.wait(lambda: phase() in ("Succeeded", "Failed"), "the end of the pod", 30)
    assert phase() == "Succeeded", cluster.kubelet.log_of(namespace, "once")


def test_a_container_that_fails_its_liveness_probe_is_restarted(
    cluster: Cluster, namespace: str
) -> None:
    probe = {"exec": {"command": ["/bin/false"]}, "periodSeconds": 1, "failureThreshold": 2}
    cluster.api.apply(deployment("sick", 1, livenessProbe=probe), namespace)

    def restarts() -> int:
        statuses = [each["status"].get("containerStatuses", []) for each in cluster.pods(namespace)]
        return sum(each["restartCount"] for status in statuses for each in status)

    cluster.wait(lambda: restarts() >= 2, "two restarts")


def test_a_pod_ends_by_its_hook_and_sigterm_within_its_grace(
    cluster: Cluster, namespace: str
) -> None:
    """A slow hook keeps the pod; meanwhile it is no endpoint any more."""
    hook = {"preStop": {"exec": {"command": ["sleep", "2"]}}}
    cluster.api.apply(deployment("slow", 1, lifecycle=hook), namespace)
    cluster.api.apply(service("slow"), namespace)
    cluster.wait_for_rollout(namespace)
    (old,) = cluster.pods(namespace, "app=slow")
    name = old["metadata"]["name"]
    cluster.api.call("DELETE", f"/api/v1/namespaces/{namespace}/pods/{name}")

    def names() -> set[str]:
        return {each["metadata"]["name"] for each in cluster.pods(namespace, "app=slow")}

    def endpoints() -> str:
        return str(cluster.api.try_get(f"/api/v1/namespaces/{namespace}/endpoints/slow"))

    cluster.wait(lambda: name not in endpoints(), "the endpoint to leave", 10)
    assert name in names(), "the hook still runs"
    cluster.wait(lambda: name not in names(), "the end of the pod", 20)
    cluster.wait(lambda: any(is_ready(each) for each in cluster.pods(namespace)), "the next pod")


def test_an_eviction_waits_for_the_disruption_budget(cluster: Cluster, namespace: str) -> None:
    cluster.api.apply(deployment("kept", 1), namespace)
    budget = {
        "apiVersion": "policy/v1beta1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "kept"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "kept"}}},
    }
    cluster.api.apply(budget, namespace)
    cluster.wait_for_rollout(namespace)
    (pod,) = cluster.pods(namespace)
    name = pod["metadata"]["name"]
    path = f"/apis/policy/v1beta1/namespaces/{namespace}/poddisruptionbudgets/kept"
    cluster.wait(lambda: cluster.api.call("GET", path).get("status", {}).get("currentHealthy"),
                 "the budget")  # fmt: skip
    eviction = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": name}}
    with pytest.raises(KubeError, match="429"):
        cluster.api.call("POST", f"/api/v1/namespaces/{namespace}/pods/{name}/eviction", eviction)
