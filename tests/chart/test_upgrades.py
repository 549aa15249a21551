"""What an upgrade would do to objects that cannot change, and to what an autoscaler chose."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from helm_python import Config

from tests.chart.chart import NAMESPACE, RELEASE, Object, chart, of_kind, parsed, render
from tests.chart.fake_cluster import cluster_with
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


def replicas(files: dict[str, str]) -> dict[str, int]:
    found = of_kind(parsed(files), "Deployment")
    return {name: each["spec"]["replicas"] for name, each in found.items()}


def test_switching_an_autoscaler_on_leaves_what_runs(tmp_path: Path) -> None:
    (values,) = [each.values for each in RELEASES if each.name == "autoscaling"]
    assert replicas(render(values)) == {"router": 2, "prefill": 1, "decode": 2}, "the minimum"
    running = {f"{RELEASE}-baton-{name}": number for name, number in (("decode", 9), ("router", 1))}
    with (
        cluster_with(running, tmp_path) as kubeconfig,
        Config(kubeconfig_path=kubeconfig, namespace=NAMESPACE) as config,
    ):
        files = config.render(chart(), values, name=RELEASE, namespace=NAMESPACE)
    assert replicas(files) == {"router": 2, "prefill": 1, "decode": 9}


def test_a_long_wait_for_ready_pods_ends_before_the_rollout_s_deadline() -> None:
    """Kubernetes takes no deadline that the wait alone exceeds."""
    files = render({"workers": {"minReadySeconds": 3600}})
    for name, found in of_kind(parsed(files), "Deployment").items():
        spec = found["spec"]
        assert spec.get("progressDeadlineSeconds", 600) > spec.get("minReadySeconds", 0), name
