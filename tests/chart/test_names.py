"""Names, labels and numbers, as people give them, become what Kubernetes takes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.chart.chart import NEWEST, Object, RefusedError, of_kind, parsed, pod_templates, render
from tests.chart.kube_schemas import problems
from tests.chart.releases import RELEASES, gpu
from tests.effort import some

(EVERYTHING,) = [each.values for each in RELEASES if each.name == "everything"]
DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
RELEASE_NAMES = [
    *("llm.v2", "70b", "1234567", "true", "null", "0x1f", "1e3", "0123", "1.10", "on"),
    "a" * 53,
    "a" * 39 + "-b",
]


def installed(values: dict[str, Any], name: str = "demo") -> list[Object]:
    """The objects of a release, each of which Kubernetes takes."""
    found = parsed(render(values, name=name))
    assert [each for one in found for each in problems(one, NEWEST)] == []
    return found


@pytest.mark.parametrize("name", some(RELEASE_NAMES, 5))
@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["nothing", "everything"])
def test_a_release_may_have_any_name_that_helm_takes(values: dict[str, Any], name: str) -> None:
    own = [
        each
        for each in installed(values, name)
        if each["metadata"]["name"] not in ("one", f"{name}-two")  # extraObjects
    ]
    for each in own:
        assert DNS_LABEL.fullmatch(each["metadata"]["name"])
        assert len(each["metadata"]["name"]) <= 63
        assert each["metadata"]["labels"]["app.kubernetes.io/instance"] == name
    services = [each for each in own if each["kind"] == "Service"]
    pods = [pod["metadata"]["labels"].items() for _, pod in pod_templates(own)]
    for service in services:
        assert any(service["spec"]["selector"].items() <= labels for labels in pods)


@pytest.mark.parametrize(
    "names",
    [
        ("a" * 44 + "b", "a" * 44 + "c"),
        ("llm.v2", "llm-v2"),
        ("70b", "baton-70b"),
        ("baton-" + "a" * 40, "baton-" + "a" * 34),
    ],
)
def test_two_releases_never_share_a_name(names: tuple[str, str]) -> None:
    first, second = (
        {(each["kind"], each["metadata"]["name"]) for each in parsed(render({}, name=name))}
        for name in names
    )
    assert first & second == set()


def test_usual_names_are_as_they_are_written() -> None:
    for name, full in (("demo", "demo-baton"), ("my-baton", "my-baton"), ("a" * 34, None)):
        (service,) = [
            each["metadata"]["name"]
            for each in parsed(render({}, name=name))
            if each["kind"] == "Service"
            and each["metadata"]["labels"]["app.kubernetes.io/component"] == "router"
        ]
        assert service == (full or f"{name}-baton")


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"fullnameOverride": "true"}, "true"),
        ({"fullnameOverride": "null"}, "null"),
        ({"nameOverride": "1.10"}, None),
        ({"nameOverride": "true"}, "demo-true"),
        ({"pools": {"true": {"role": "decode"}, "null": {"role": "prefill"}}}, "demo-baton"),
    ],
)
def test_names_that_yaml_reads_as_something_else(values: dict[str, Any], name: str | None) -> None:
    services = of_kind(installed(values), "Service")
    assert name is None or name in services


@pytest.mark.parametrize(
    ("given", "proposed"), [("7b", "baton-7b"), ("llm.v2", "llm-v2"), ("0x1f", "baton-0x1f")]
)
def test_a_full_name_that_no_service_can_have_is_refused(given: str, proposed: str) -> None:
    with pytest.raises(RefusedError) as refused:
        render({"fullnameOverride": given})
    assert f"fullnameOverride: {given} cannot name a Service" in str(refused.value)
    assert f"set {proposed}\n" in str(refused.value)
    assert proposed in of_kind(installed({"fullnameOverride": proposed}), "Service")


GIVEN = {"example.com/a": 42, "b": True, "c": 5000000, "d": "0123", "e": 0.5, "f": "yes", "g": None}
WRITTEN = {"example.com/a": "42", "b": "true", "c": "5000000", "d": "0123", "e": "0.5", "f": "yes"}


def test_numbers_and_booleans_become_strings_where_kubernetes_wants_strings() -> None:
    pods = {"podLabels": GIVEN, "podAnnotations": GIVEN, "nodeSelector": GIVEN}
    env = {"env": [{"name": name, "value": GIVEN[name]} for name in "bcde"]}
    found = installed(
        gpu(
            router=pods | env | {"service": {"annotations": GIVEN}},
            store=pods | env,
            jobs=pods,
            serviceAccount={"annotations": GIVEN},
            serviceMonitor={"enabled": True, "labels": GIVEN},
            prometheusRule={"enabled": True, "labels": GIVEN},
            grafana={"enabled": True, "labels": {"grafana_dashboard": 1}},
            ingress={"enabled": True, "annotations": GIVEN},
            pools={
                "prefill": {"role": "prefill"} | pods,
                "decode": {
                    "role": "decode",
                    "autoscaling": {
                        "type": "keda",
                        "triggers": [{"type": "cron", "metadata": {"start": 5, "wait": True}}],
                    },
                }
                | pods
                | env,
            },
        )
    )
    for name, pod in pod_templates(found):
        assert WRITTEN.items() <= pod["metadata"]["labels"].items(), name
        assert WRITTEN.items() <= pod["metadata"]["annotations"].items(), name
        assert pod["spec"]["nodeSelector"] == WRITTEN, name
    (container,) = of_kind(found, "Deployment")["decode"]["spec"]["template"]["spec"]["containers"]
    shown = {each["name"]: each.get("value") for each in container["env"]}
    assert {name: WRITTEN[name] for name in "bcde"}.items() <= shown.items()
    (scaled,) = of_kind(found, "ScaledObject").values()
    assert scaled["spec"]["triggers"][0]["metadata"] == {"start": "5", "wait": "true"}


def test_large_numbers_keep_their_digits() -> None:
    target = {"type": "Utilization", "averageUtilization": 1000000}
    metric = {"type": "Resource", "resource": {"name": "memory", "target": target}}
    values = gpu(
        requestTimeoutSeconds=86400,
        podSecurityContext={"runAsUser": 1000650000, "runAsNonRoot": True, "fsGroup": 1000650000},
        workers=EVERYTHING["workers"] | {"shmSize": 1073741824, "startupSeconds": 604800},
        store={"persistence": {"enabled": True, "size": 5368709120}},
        router={"autoscaling": {"enabled": True, "metrics": [metric]}, "replicas": 10000},
        httpRoute={"enabled": True, "parentRefs": [{"name": "gateway"}]},
        preflight={"enabled": True, "mib": 1048576, "pods": 1000},
    )
    text = "\n".join(render(values).values())
    assert re.findall(r"\d[.]?\d*e[+]\d+", text) == []
    installed(values)
