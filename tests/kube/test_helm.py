"""Helm's own actions on a cluster: install, upgrade, rollback, test, and blue-green."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.kube.cluster import Cluster
from tests.kube.demo_release import VALUES, changed, key_of, names_of, url_of
from tests.kube.helm_release import HelmRelease
from tests.kube.load import Load

pytestmark = pytest.mark.kube


@pytest.fixture(scope="module")
def blue(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HelmRelease]:
    """The release `demo`."""
    namespace = cluster.make_namespace("helm")
    made = HelmRelease(cluster, namespace, "demo", tmp_path_factory.mktemp("blue"))
    made.install(VALUES)
    yield made
    made.close()


def test_an_upgrade_and_a_rollback_by_helm_lose_nothing(blue: HelmRelease) -> None:
    first = names_of(blue, "worker")
    key = key_of(blue)
    load = Load(url_of(blue), key, "demo_model", num_clients=4, max_tokens=60)
    load.assert_goes_on()
    blue.upgrade(changed(VALUES, max_batch_size=15))
    second = names_of(blue, "worker")
    assert (len(second), first & second) == (3, set()), "helm waited for the rollout"
    load.assert_goes_on()
    blue.rollback()
    third = names_of(blue, "worker")
    assert (len(third), second & third) == (3, set())
    load.assert_goes_on()
    outcome = load.stop()
    assert outcome.errors == []
    assert blue.history() == ["superseded", "superseded", "deployed"]
    assert key_of(blue) == key, "the Secret is no part of any revision"
    blue.run_tests()


GREEN = {
    **VALUES,
    "secrets": {"existingSecret": "demo-baton-secrets"},
    "router": {"replicas": 1, "lameDuckSeconds": 3},
    "workers": {**VALUES["workers"], "settings": {"block_size": 32, "num_blocks": 300}},
    "pools": {"prefill": {"role": "prefill"}, "decode": {"role": "decode"}},
}
"""Another KV layout, so another fleet: it keeps the keys of clients."""


def test_another_layout_beside_the_old_one_takes_the_clients_over(
    blue: HelmRelease, cluster: Cluster, tmp_path: Path
) -> None:
    front = f"http://{front_door(cluster, blue)}"
    load = Load(front, key_of(blue), "demo_model", num_clients=3, max_tokens=60)
    green = HelmRelease(cluster, blue.namespace, "green", tmp_path)
    try:
        green.install(GREEN)
        green.run_tests()
        fleets = [fleet_of(each, key_of(blue, "admin-keys")) for each in (blue, green)]
        assert [len(each) for each in fleets] == [3, 2]
        assert not fleets[0] & fleets[1], "no router uses the other's workers"
        load.assert_goes_on(4)
        front_door(cluster, green)
        load.assert_goes_on()
        blue.uninstall()
        cluster.wait(lambda: not running(cluster, blue.namespace, OF_BLUE), "the end of blue")
        load.assert_goes_on()
        outcome = load.stop()
        assert outcome.errors == []
        assert key_of(blue), "the Secret stays"
        green.uninstall()
    finally:
        green.close()


OF_BLUE = "app.kubernetes.io/instance=demo"


def running(cluster: Cluster, namespace: str, selector: str) -> list[str]:
    """The names of pods that have not finished: Helm leaves those of its tests behind."""
    pods = cluster.pods(namespace, selector)
    return [each["metadata"]["name"] for each in pods if each["status"]["phase"] != "Succeeded"]


def front_door(cluster: Cluster, release: HelmRelease) -> str:
    """The address of a Service of one's own, which leads to the routers of this release now."""
    chosen = {
        "app.kubernetes.io/instance": release.name, "app.kubernetes.io/component": "router",
    }  # fmt: skip
    ports = [{"name": "http", "port": 80, "targetPort": 8000}]
    service = {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "front"},
        "spec": {"selector": chosen, "ports": ports},
    }  # fmt: skip
    address = str(cluster.api.apply(service, release.namespace)["spec"]["clusterIP"])
    cluster.wait(lambda: leads_to(cluster, release), f"the Service to lead to {release.name}")
    cluster.wait(lambda: answers(f"http://{address}/live"), "its address to answer")
    return address


def answers(url: str) -> bool:
    """Whether a GET succeeds."""
    try:
        return httpx.get(url, timeout=1).status_code == 200
    except httpx.TransportError:
        return False


def leads_to(cluster: Cluster, release: HelmRelease) -> bool:
    """Whether the Service's endpoints are this release's routers, all of which are ready."""
    path = f"/api/v1/namespaces/{release.namespace}/endpoints/front"
    found = cluster.api.try_get(path) or {}
    named = [
        each["targetRef"]["name"]
        for subset in found.get("subsets", [])
        for each in subset.get("addresses", [])
    ]
    return bool(named) and set(named) == names_of(release, "router")


def fleet_of(release: HelmRelease, key: str) -> set[str]:
    """The workers that the release's routers use."""
    headers = {"authorization": f"Bearer {key}"}
    workers = httpx.get(f"{url_of(release)}/fleet", headers=headers).json()["workers"]
    return {each["worker_id"] for each in workers if each["state"] == "ready"}
