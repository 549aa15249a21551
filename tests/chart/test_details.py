"""What single values change in a release."""

from __future__ import annotations

from typing import Any

import pytest

from cli.pods.kube_secret import PARTS
from tests.chart.chart import (
    is_secrets_job,
    notes,
    objects,
    of_kind,
    pod_templates,
    render,
)
from tests.chart.kube_schemas import problems
from tests.chart.pods import container, pod, release
from tests.chart.releases import EXTRAS, GPU, MODEL, RELEASES, gpu


def test_validation_finds_a_misspelt_field() -> None:
    for kind, path in (("Deployment", ("spec", "template", "spec")), ("HTTPRoute", ("spec",))):
        found = next(iter(of_kind(release("gateway"), kind).values()))
        assert problems(found, "1.30.0") == []
        inner = found
        for key in path:
            inner = inner[key]
        inner["hostNetwrok"] = True
        assert "hostNetwrok" in problems(found, "1.30.0")[0]


@pytest.mark.parametrize(
    ("values", "image", "policy"),
    [
        ({}, "baton:0.1.0-cpu", "Never"),
        ({"image": {"repository": "r.example/b"}}, "r.example/b:0.1.0-cpu", "IfNotPresent"),
        ({"image": {"repository": "r/b", "tag": "t", "pullPolicy": "Always"}}, "r/b:t", "Always"),
        (
            {"image": {"repository": "r/b", "digest": "sha256:" + "0" * 64}},
            "r/b@sha256:" + "0" * 64,
            "IfNotPresent",
        ),
        (gpu(image={"repository": "r/b"}), "r/b:0.1.0-cuda", "IfNotPresent"),
    ],
)
def test_no_image_is_pulled_that_nobody_named(values, image: str, policy: str) -> None:
    for _, found in pod_templates(objects(values)):
        for each in found["spec"]["containers"]:
            assert (each["image"], each["imagePullPolicy"]) == (image, policy)


def test_the_secret_is_made_before_all_else_and_by_nothing_but_the_job() -> None:
    found = objects({})
    hooks = {
        each["kind"]: each["metadata"]["annotations"]
        for each in found
        if each["metadata"]["name"].startswith("demo-baton-secrets-")
    }
    assert set(hooks) == {"ServiceAccount", "Role", "RoleBinding", "Job"}
    assert {each["helm.sh/hook"] for each in hooks.values()} == {"pre-install,pre-upgrade"}
    weights = {kind: int(each["helm.sh/hook-weight"]) for kind, each in hooks.items()}
    assert max(weights, key=lambda kind: weights[kind]) == "Job"
    role = of_kind(found, "Role")["secrets-job"]
    assert [(each["verbs"], each.get("resourceNames")) for each in role["rules"]] == [
        (["create"], None),
        (["get", "patch"], ["demo-baton-secrets"]),
    ]
    used = {
        each["valueFrom"]["secretKeyRef"]["key"]
        for _, one in pod_templates(found)
        for inner in one["spec"]["containers"]
        for each in inner.get("env", [])
        if each.get("valueFrom", {}).get("secretKeyRef", {}).get("name") == "demo-baton-secrets"
    }
    assert used == set(PARTS)


@pytest.mark.parametrize("values", [{"podEvents": False}, {"pools": {"a": {"role": "decode"}}}])
def test_without_events_no_worker_has_a_token(values: dict[str, Any]) -> None:
    found = objects(values)
    assert set(of_kind(found, "Role")) == {"secrets-job"}
    assert not any(
        pod["spec"]["automountServiceAccountToken"]
        for _, pod in pod_templates(found)
        if not is_secrets_job(pod)
    )


def test_conditions_need_a_right_that_is_given_only_if_asked_for() -> None:
    for values in ({}, {"podConditions": True}):
        found = objects(values)
        rules = of_kind(found, "Role")["worker"]["rules"]
        granted = [(rule["resources"], rule["verbs"]) for rule in rules]
        conditions = [(["pods/status"], ["patch"])] if values else []
        assert granted == [(["events"], ["create"]), *conditions]
        for name, template in pod_templates(found):
            args = template["spec"]["containers"][0].get("args", [])
            is_told = bool(values) and name.endswith("-decode")
            assert ("--pod-conditions" in args) is is_told, name


def test_prefill_is_required_of_decode_workers_only() -> None:
    for name, template in pod_templates(objects({"requirePrefill": True})):
        args = template["spec"]["containers"][0].get("args", [])
        assert ("--require-prefill" in args) is name.endswith("-decode"), name


def test_your_own_secret_needs_no_job() -> None:
    found = objects({"secrets": {"existingSecret": "ours"}})
    assert set(of_kind(found, "Role")) == {"worker"}
    assert not of_kind(found, "Job")
    names = {
        each["valueFrom"]["secretKeyRef"]["name"]
        for each in container({"secrets": {"existingSecret": "ours"}}, "router")["env"]
        if "secretKeyRef" in each.get("valueFrom", {})
    }
    assert names == {"ours"}


def test_an_upgrade_renders_the_same_release() -> None:
    first = render({}, revision=1, is_install=True)
    second = render({}, revision=2, is_upgrade=True)
    assert first == second


def test_devices_are_asked_for_by_name_or_by_claim() -> None:
    limits = container(gpu(), "decode")["resources"]["limits"]
    assert (limits["nvidia.com/gpu"], limits["rdma/hca_shared_devices_a"]) == (1, 1)
    (spec,) = [each.values for each in RELEASES if each.name == "dra"]
    claimed = container(spec, "decode")["resources"]
    assert claimed["claims"] == [{"name": "devices"}]
    assert set(claimed["limits"]) == {"memory"}
    template = of_kind(objects(spec), "ResourceClaimTemplate")["decode"]["spec"]["spec"]["devices"]
    assert [each["name"] for each in template["requests"]] == ["gpu", "nic"]
    assert template["constraints"][0]["matchAttribute"] == "resource.kubernetes.io/pcieRoot"
    assert pod(spec, "decode")["resourceClaims"][0]["resourceClaimTemplateName"] == (
        "demo-baton-decode"
    )


def test_a_cpu_pool_asks_for_no_card() -> None:
    limits = container({}, "decode")["resources"]["limits"]
    assert set(limits) == {"cpu", "memory"}
    assert not pod({}, "decode").get("tolerations")


def test_size_of_the_model_sets_memory_deadline_and_claim() -> None:
    small, large = (
        gpu(model=MODEL | {"sizeGi": size, "cache": {"type": "pvc"}}) for size in (1.5, 140)
    )
    assert container(small, "decode")["resources"]["limits"]["memory"] == "6016Mi"
    assert container(large, "decode")["resources"]["limits"]["memory"] == "183296Mi"
    probe = container(large, "decode")["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 300 + 30 * 140
    (claim,) = of_kind(objects(large), "PersistentVolumeClaim").values()
    assert claim["spec"]["resources"]["requests"]["storage"] == "192Gi"
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_workers_of_a_release_stay_in_one_rdma_domain() -> None:
    values = gpu(
        workers=GPU
        | {
            "topology": {"domainLabel": "net/domain"},
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {}}},
        }
    )
    affinity = pod(values, "decode")["affinity"]
    (term,) = affinity["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "net/domain"
    assert "nodeAffinity" in affinity
    for component in ("prefill", "decode"):
        labels = next(
            found["metadata"]["labels"]
            for name, found in pod_templates(objects(values))
            if name.endswith(component)
        )
        assert term["labelSelector"]["matchLabels"].items() <= labels.items()


def test_without_a_free_card_a_worker_leaves_before_its_successor_starts() -> None:
    found = of_kind(objects(gpu(workers=GPU | {"maxSurge": 0})), "Deployment")
    assert found["decode"]["spec"]["strategy"]["rollingUpdate"] == {
        "maxSurge": 0,
        "maxUnavailable": 1,
    }


def test_extras_reach_all_pods() -> None:
    for name, found in pod_templates(release("everything")):
        assert found["spec"]["imagePullSecrets"] == [{"name": "registry"}], name
        assert EXTRAS["podLabels"].items() <= found["metadata"]["labels"].items(), name
        assert EXTRAS["podAnnotations"].items() <= found["metadata"]["annotations"].items(), name
        assert found["spec"]["nodeSelector"] == EXTRAS["nodeSelector"], name
        assert found["spec"]["tolerations"], name


def test_probes_have_a_port_of_their_own() -> None:
    pods = [pod for _, pod in pod_templates(objects({}))]
    workers = [c for each in pods for c in each["spec"]["containers"] if c["name"] == "worker"]
    assert workers
    for worker in workers:
        ports = {each["name"]: each["containerPort"] for each in worker["ports"]}
        assert f"--probe-port={ports['probes']}" in worker["args"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert worker[probe]["httpGet"]["port"] == "probes"


def test_monitors_find_their_services_and_send_a_viewer_s_key() -> None:
    found = release("monitoring")
    monitors = of_kind(found, "ServiceMonitor")
    services = of_kind(found, "Service").values()
    for monitor in monitors.values():
        wanted = monitor["spec"]["selector"]["matchLabels"]
        chosen = [each for each in services if wanted.items() <= each["metadata"]["labels"].items()]
        (service,) = chosen
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    credentials = monitors["router"]["spec"]["endpoints"][0]["authorization"]["credentials"]
    assert credentials == {"name": "demo-baton-secrets", "key": "viewer-keys"}
    (router,) = of_kind(found, "Deployment")["router"]["spec"]["template"]["spec"]["containers"]
    known = {each["name"]: each.get("valueFrom", {}) for each in router["env"]}
    assert known["BATON_VIEWER_KEYS"]["secretKeyRef"]["key"] == credentials["key"]


@pytest.mark.parametrize("door", ["open", "api", "viewer", "admin"])
def test_prometheus_sends_the_key_that_metrics_need(door: str) -> None:
    values = {
        "serviceMonitor": {"enabled": True},
        "router": {"settings": {"metrics_access": door}},
    }
    monitor = of_kind(objects(values), "ServiceMonitor")["router"]
    sent = monitor["spec"]["endpoints"][0].get("authorization", {}).get("credentials", {})
    assert sent.get("key") == (None if door == "open" else f"{door}-keys")


def test_prometheus_needs_no_more_of_a_certificate_s_secret_than_routers_do() -> None:
    """A Secret that ACME filled holds tls.crt and tls.key, and no authority."""
    for given, name in (({}, "demo-baton"), ({"serverName": "ai.example"}, "ai.example")):
        values = {
            "router": {"tls": {"secretName": "certificate"}},
            "serviceMonitor": {"enabled": True} | given,
        }
        monitor = of_kind(objects(values), "ServiceMonitor")["router"]
        (endpoint,) = monitor["spec"]["endpoints"]
        certificate = {"secret": {"name": "certificate", "key": "tls.crt"}}
        assert endpoint["tlsConfig"] == {"serverName": name, "ca": certificate}


@pytest.mark.parametrize(
    ("values", "present", "absent"),
    [
        (
            {},
            ["demo model", "deploy/docker/build cpu baton:0.1.0-cpu", "over TCP", "$KEY"],
            ["need no keys"],
        ),
        (
            gpu(),
            ["Qwen/Qwen3-8B", "helm test demo"],
            ["demo model", "deploy/docker", "over TCP", "again"],
        ),
        (
            gpu(model=MODEL | {"servedName": "qwen3,chat"}),
            ['"model": "qwen3", "messages"'],
            ['"model": "qwen3,chat"'],
        ),
        ({}, ["--timeout=30m deployment -l"], ["leaderworkerset"]),
        (
            {"workers": {"tensorParallel": 2, "nodesPerWorker": 2}},
            ["--timeout=30m deployment,leaderworkersets.leaderworkerset.x-k8s.io -l"],
            [],
        ),
        (
            gpu(preflight={"enabled": True}),
            ["logs --selector app.kubernetes.io/instance=demo,b"],
            [],
        ),
        (gpu(kv={"path": "tcp"}), ["WARNING: KV blocks move over TCP"], []),
        (gpu(model=MODEL | {"cache": {"type": "emptyDir"}}), ["every pod downloads"], []),
        (
            gpu(router={"apiKeys": {"enabled": False}}, store={"tls": {"enabled": False}}),
            ["need no keys", "store are not encrypted"],
            ["$KEY"],
        ),
        (
            gpu(secrets={"existingSecret": "ours"}),
            ["ours must hold cluster-secret, store-password, api-keys, admin-keys."],
            [],
        ),
    ],
)
def test_notes_say_what_was_installed(values, present: list[str], absent: list[str]) -> None:
    text = notes(values)
    assert [each for each in present if each not in text] == []
    assert [each for each in absent if each in text] == []


def test_a_pool_s_pods_can_have_to_stay_ready_for_a_while() -> None:
    pools = {
        "prefill": {"role": "prefill"}, "decode": {"role": "decode", "minReadySeconds": 10},
    }  # fmt: skip
    deployments = of_kind(objects({"pools": pools}), "Deployment")
    assert deployments["decode"]["spec"]["minReadySeconds"] == 10
    assert "minReadySeconds" not in deployments["prefill"]["spec"]


def test_tiers_have_memory_a_limited_volume_and_the_flags_of_both() -> None:
    tiers = {"host": "1Gi", "disk": {"size": "10Gi"}}
    plain, found = container({}, "decode"), container({"workers": {"tiers": tiers}}, "decode")
    flags = [each for each in found["args"] if "tier" in each]
    assert flags == [
        f"--host-tier-bytes={1 << 30}", f"--disk-tier-bytes={10 << 30}", "--disk-tier-dir=/tiers",
    ]  # fmt: skip
    mebibytes = [
        int(each["resources"]["limits"]["memory"].removesuffix("Mi")) for each in (plain, found)
    ]
    assert mebibytes[1] - mebibytes[0] == 1024
    assert found["resources"]["limits"]["ephemeral-storage"] == "12288Mi"
    assert found["resources"]["requests"]["ephemeral-storage"] == "12288Mi"
    assert {"name": "tiers", "mountPath": "/tiers"} in found["volumeMounts"]
    volumes = {
        each["name"]: each for each in pod({"workers": {"tiers": tiers}}, "decode")["volumes"]
    }
    assert volumes["tiers"]["emptyDir"] == {"sizeLimit": "11264Mi"}
    assert not any("tier" in each for each in plain["args"])


def test_a_tier_may_have_a_volume_of_its_own_or_a_claim() -> None:
    volumes = {
        name.rpartition("-")[2]: {each["name"]: each for each in found["spec"]["volumes"]}
        for name, found in pod_templates(release("tiers"))
    }
    spec = volumes["prefill"]["tiers"]["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert spec["storageClassName"] == "fast"
    assert spec["resources"] == {"requests": {"storage": "56320Mi"}}
    assert volumes["decode"]["tiers"]["persistentVolumeClaim"] == {"claimName": "blocks"}
    assert volumes["other"]["tiers"]["emptyDir"] == {"sizeLimit": "56320Mi"}
