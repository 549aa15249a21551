"""The chart on a cluster: it comes up with the demo model, and nothing is lost while it changes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator

import httpx
import pytest

from tests.kube.cluster import Cluster
from tests.kube.demo_release import VALUES, changed, key_of, names_of, url_of
from tests.kube.load import Load
from tests.kube.release import Release

pytestmark = pytest.mark.kube
_numbers = itertools.count()


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Iterator[Release]:
    """The chart with one prefill and two decode workers, and two routers."""
    made = Release(cluster, cluster.make_namespace(f"chart{next(_numbers)}"))
    made.apply(VALUES)
    cluster.wait_for_rollout(made.namespace)
    yield made
    made.uninstall()


@pytest.fixture
def load(release: Release) -> Iterator[Load]:
    """Clients that ask throughout the test; it fails if one saw an error."""
    running = Load(url_of(release), key_of(release), "demo_model", num_clients=4, max_tokens=60)
    yield running
    outcome = running.stop()
    assert not outcome.errors, outcome.errors[:3]
    assert outcome.finished > 0


def test_the_release_answers_and_its_own_test_succeeds(release: Release) -> None:
    assert len(names_of(release, "router")) == 2
    assert len(names_of(release, "worker")) == 3
    written = release.run_tests(VALUES)
    assert "prefill" in written, written
    url = url_of(release)
    assert httpx.get(f"{url}/v1/models").status_code == 401
    headers = {"authorization": f"Bearer {key_of(release)}"}
    models = httpx.get(f"{url}/v1/models", headers=headers).json()
    assert [each["id"] for each in models["data"]] == ["demo_model"]


def test_generated_secrets_survive_an_upgrade(release: Release) -> None:
    before = {name: key_of(release, name) for name in ("api-keys", "cluster-secret")}
    release.apply(VALUES)
    release.cluster.wait_for_rollout(release.namespace)
    assert {name: key_of(release, name) for name in before} == before


def test_an_upgrade_of_both_pools_loses_nothing(release: Release, load: Load) -> None:
    old = names_of(release, "worker")
    load.assert_goes_on()
    release.apply(changed(VALUES, max_batch_size=15))
    release.cluster.wait_for_rollout(release.namespace)
    load.assert_goes_on()
    assert not old & names_of(release, "worker")


def test_a_revert_in_mid_rollout_loses_nothing(release: Release, load: Load) -> None:
    old = names_of(release, "worker")
    release.apply(changed(VALUES, max_batch_size=14))
    release.cluster.wait(lambda: names_of(release, "worker") - old, "a worker of the new revision")
    load.assert_goes_on(4)
    release.apply(VALUES)
    release.cluster.wait_for_rollout(release.namespace)
    load.assert_goes_on()


def test_a_scale_in_and_an_eviction_lose_nothing(release: Release, load: Load) -> None:
    fewer = copy.deepcopy(VALUES)
    fewer["pools"]["decode"]["replicas"] = 1
    release.apply(fewer)
    release.cluster.wait_for_rollout(release.namespace)
    load.assert_goes_on()
    release.apply(VALUES)
    release.cluster.wait_for_rollout(release.namespace)
    pods = release.cluster.pods(release.namespace, "baton-pool=decode")
    name = pods[0]["metadata"]["name"]
    eviction = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": name}}
    path = f"/api/v1/namespaces/{release.namespace}/pods/{name}/eviction"
    release.cluster.api.call("POST", path, eviction)
    load.assert_goes_on()
    release.cluster.wait(lambda: name not in str(names_of(release, "worker")), "the eviction")
    release.cluster.wait_for_rollout(release.namespace)
    load.assert_goes_on()


def test_an_upgrade_of_the_routers_ends_no_stream(release: Release, load: Load) -> None:
    old = names_of(release, "router")
    values = copy.deepcopy(VALUES)
    values["router"]["settings"] = {"trace_history": 900}
    release.apply(values)
    release.cluster.wait_for_rollout(release.namespace)
    load.assert_goes_on()
    assert not old & names_of(release, "router")


def test_a_lost_prefill_pool_is_an_event_of_the_decode_pods(release: Release, load: Load) -> None:
    pods = release.cluster.pods(release.namespace, "baton-pool=decode")
    decode = {each["metadata"]["uid"] for each in pods}
    assert len(decode) == 2
    without = copy.deepcopy(VALUES)
    without["pools"]["prefill"]["replicas"] = 0
    release.apply(without)
    release.cluster.wait(lambda: about(release, "PrefillUnreachable") == decode, "the Events")
    release.cluster.wait(lambda: reachable(release) == ["False"] * 2, "the conditions")
    load.assert_goes_on()
    release.apply(VALUES)
    release.cluster.wait(lambda: about(release, "PrefillReachable") == decode, "the Events' end")
    release.cluster.wait(lambda: reachable(release) == ["True"] * 2, "the conditions' end")
    release.cluster.wait_for_rollout(release.namespace)
    load.assert_goes_on()


def reachable(release: Release) -> list[str]:
    """The condition baton/PrefillReachable of each decode pod that has it."""
    return [
        condition["status"]
        for pod in release.cluster.pods(release.namespace, "baton-pool=decode")
        for condition in pod["status"].get("conditions", [])
        if condition["type"] == "baton/PrefillReachable"
    ]


def about(release: Release, reason: str) -> set[str]:
    """The uids of the pods that Events with this reason are about."""
    path = f"/api/v1/namespaces/{release.namespace}/events"
    found = release.cluster.api.list(path, fieldSelector=f"reason={reason}")
    return {each["involvedObject"]["uid"] for each in found}


def test_accounts_may_do_what_they_need_and_nothing_else(release: Release) -> None:
    calls = [
        (verb, resource)
        for resource in ("events", "pods", "pods/status", "secrets", "configmaps", "services")
        for verb in ("create", "get", "list", "watch", "patch", "delete")
    ]
    granted = {
        account: [call for call in calls if may(release, account, *call)]
        for account in ("worker", "router", "jobs", "store", "secrets-job")
    }
    needed = {"worker": [("create", "events"), ("patch", "pods/status")]}
    assert granted == {account: [] for account in granted} | needed


def may(release: Release, account: str, verb: str, resource: str) -> bool:
    """Whether a service account of the release may do this in its namespace."""
    user = f"system:serviceaccount:{release.namespace}:{release.name}-baton-{account}"
    kind, _, part = resource.partition("/")
    namespace = release.namespace
    attributes = {"namespace": namespace, "verb": verb, "resource": kind, "subresource": part}
    review = {
        "apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
        "spec": {"user": user, "resourceAttributes": attributes},
    }  # fmt: skip
    path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    return bool(release.cluster.api.call("POST", path, review)["status"]["allowed"])


def test_all_pods_that_start_afresh_at_once_become_ready(release: Release) -> None:
    """Workers wait for routers' admission and routers for a worker: neither waits for readiness."""
    old = {each["metadata"]["name"] for each in release.cluster.pods(release.namespace)}
    for name in old:
        path = f"/api/v1/namespaces/{release.namespace}/pods/{name}"
        release.cluster.api.call("DELETE", f"{path}?gracePeriodSeconds=1")

    def has_begun() -> bool:
        pods = release.cluster.pods(release.namespace)
        return not (old - {"demo-baton-store-0"}) & {each["metadata"]["name"] for each in pods}

    release.cluster.wait(has_begun, "the old pods to end")
    release.cluster.wait_for_rollout(release.namespace)
    assert (len(names_of(release, "router")), len(names_of(release, "worker"))) == (2, 3)
    assert "prefill" in release.run_tests(VALUES)
