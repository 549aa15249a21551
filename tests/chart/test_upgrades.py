"""What an upgrade would do to objects that cannot change, and to what an autoscaler chose."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from helm_python import Config

from tests.chart.chart import NAMESPACE, RELEASE, Object, chart, of_kind, parsed, render
from tests.chart.fake_cluster import cluster_with, live
from tests.chart.releases import MODEL, RELEASES, gpu

PREFETCHING = gpu(
    model=MODEL | {"revision": "v1", "cache": {"type": "pvc", "prefetch": True}},
    preflight={"enabled": True},
)
CHANGES: list[tuple[str, Any]] = [
    ("image.tag", "0.2.0-cuda"),
    ("model.revision", "v2"),
    ("model.hub", {"endpoint": "https://mirror"}),
    ("jobs", {"resources": {"limits": {"memory": "2Gi"}}, "nodeSelector": {"disk": "fast"}}),
    ("podSecurityContext", {"runAsUser": 1002}),
]


def with_change(path: str, value: Any) -> dict[str, Any]:
    values = copy.deepcopy(PREFETCHING)
    *parents, last = path.split(".")
    inner = values
    for each in parents:
        inner = inner[each]
    inner[last] = value
    return values


def jobs(values: dict[str, Any], **options: Any) -> dict[str, Object]:
    return of_kind(parsed(render(values, **options)), "Job")


@pytest.mark.parametrize(("path", "value"), CHANGES)
def test_a_job_whose_pods_change_is_another_job(path: str, value: Any) -> None:
    before, after = jobs(PREFETCHING), jobs(with_change(path, value))
    assert len(before) == len(after) == 3
    for name in before.keys() & after.keys():
        assert before[name]["spec"] == after[name]["spec"], "a Job's template is immutable"
    assert before.keys() != after.keys()


def test_a_job_that_stays_the_same_runs_no_second_time() -> None:
    first, second = (jobs(PREFETCHING, revision=each) for each in (1, 2))
    again = {name.partition("-")[0] for name in first.keys() & second.keys()}
    assert again == {"prefetch", "secrets"}, "each revision has a preflight of its own"
    assert jobs(PREFETCHING).keys() == first.keys()
    for job in first.values():
        is_hook = "helm.sh/hook" in job["metadata"].get("annotations", {})
        assert ("ttlSecondsAfterFinished" in job["spec"]) is is_hook, "GitOps would run it again"


def test_pods_of_a_preflight_meet_in_the_run_of_their_job() -> None:
    for name, job in jobs(PREFETCHING).items():
        if name.startswith("preflight"):
            full = job["metadata"]["name"]
            (container,) = job["spec"]["template"]["spec"]["containers"]
            assert f"--preflight-run={full}" in container["args"]
            assert job["spec"]["template"]["metadata"]["labels"]["baton-run"] == full


def render_beside(live: list[Object], values: dict[str, Any], folder: Path) -> dict[str, str]:
    """The files of a release in a cluster that has these objects."""
    with (
        cluster_with(live, folder) as kubeconfig,
        Config(kubeconfig_path=kubeconfig, namespace=NAMESPACE) as config,
    ):
        return config.render(chart(), values, name=RELEASE, namespace=NAMESPACE)


def replicas(files: dict[str, str]) -> dict[str, int]:
    found = of_kind(parsed(files), "Deployment")
    return {name: each["spec"]["replicas"] for name, each in found.items()}


def test_switching_an_autoscaler_on_leaves_what_runs(tmp_path: Path) -> None:
    (values,) = [each.values for each in RELEASES if each.name == "autoscaling"]
    assert replicas(render(values)) == {"router": 2, "prefill": 1, "decode": 2}, "the minimum"
    running = [
        live("Deployment", f"{RELEASE}-baton-{name}", {"replicas": number})
        for name, number in (("decode", 9), ("router", 1))
    ]
    files = render_beside(running, values, tmp_path)
    assert replicas(files) == {"router": 2, "prefill": 1, "decode": 9}


def claims(files: dict[str, str]) -> dict[str, str]:
    """The sizes of the claims by name."""
    found = of_kind(parsed(files), "PersistentVolumeClaim")
    return {name: each["spec"]["resources"]["requests"]["storage"] for name, each in found.items()}


def test_a_claim_grows_and_never_shrinks(tmp_path: Path) -> None:
    values = gpu(
        model=MODEL | {"cache": {"type": "pvc", "pvc": {"sizeGi": 30}}},
        store={"persistence": {"enabled": True, "size": "4Gi"}},
    )
    assert claims(render(values)) == {"cache": "30Gi", "store": "4Gi"}
    has = [
        live("PersistentVolumeClaim", f"{RELEASE}-baton-{name}", {"resources": {"requests": size}})
        for name, size in (("cache", {"storage": "192Gi"}), ("store", {"storage": "1Gi"}))
    ]
    found = claims(render_beside(has, values, tmp_path))
    assert found == {"cache": "192Gi", "store": "4Gi"}


def test_the_store_s_volume_can_come_later_and_grow() -> None:
    """A claim template of a StatefulSet is immutable."""
    for values in ({}, {"enabled": True}, {"enabled": True, "size": "9Gi"}):
        files = render({"store": {"persistence": values}})
        (store,) = of_kind(parsed(files), "StatefulSet").values()
        assert "volumeClaimTemplates" not in store["spec"]
        (data,) = [
            each for each in store["spec"]["template"]["spec"]["volumes"] if each["name"] == "data"
        ]
        named = data.get("persistentVolumeClaim", {}).get("claimName", "").split("-")[-1]
        assert [named] * bool(values) == list(claims(files))


def test_a_long_wait_for_ready_pods_ends_before_the_rollout_s_deadline() -> None:
    """Kubernetes takes no deadline that the wait alone exceeds."""
    files = render({"workers": {"minReadySeconds": 3600}})
    for name, found in of_kind(parsed(files), "Deployment").items():
        spec = found["spec"]
        assert spec.get("progressDeadlineSeconds", 600) > spec.get("minReadySeconds", 0), name
