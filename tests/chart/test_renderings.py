"""Every set of values renders objects that Kubernetes takes, and that keep the chart's rules."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.chart.chart import (
    NAMESPACE,
    NEWEST,
    OLDEST,
    Object,
    is_secrets_job,
    objects,
    of_kind,
    pod_templates,
)
from tests.chart.kube_schemas import problems
from tests.chart.releases import MODEL, RELEASES, Release, gpu

PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
LONG_RUNNING = ("Deployment", "StatefulSet", "DaemonSet")
BUDGETED = ("Deployment", "StatefulSet", "LeaderWorkerSet")


@pytest.fixture(params=RELEASES, ids=lambda each: each.name)
def release(request: pytest.FixtureRequest) -> Release:
    found: Release = request.param
    return found


@pytest.fixture
def found(release: Release) -> list[Object]:
    return objects(release.values)


def test_objects_are_valid_on_the_oldest_and_the_newest_kubernetes(release: Release) -> None:
    for version in (release.since, NEWEST):
        wrong = [
            each for one in objects(release.values, version) for each in problems(one, version)
        ]
        assert wrong == []
    assert release.since >= OLDEST


def test_names_are_short_and_unique(found: list[Object]) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in found]
    assert len(names) == len(set(names))
    assert all(len(name) <= 63 for _, name in names)


def test_objects_say_their_namespace(release: Release, found: list[Object]) -> None:
    """Also `helm template | kubectl apply` puts them where their RoleBindings point."""
    extra = len(release.values.get("extraObjects", []))
    namespaces = [each["metadata"].get("namespace") for each in found]
    assert namespaces.count(NAMESPACE) == len(found) - extra


def test_containers_have_resources_probes_and_a_security_context(found: list[Object]) -> None:
    for name, pod in pod_templates(found):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in spec["containers"] + spec.get("initContainers", []):
            resources = container["resources"]
            assert {"cpu", "memory"} <= set(resources["requests"]), name
            assert "memory" in resources["limits"], name
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True, name
            assert security["allowPrivilegeEscalation"] is False, name
            assert security["capabilities"]["drop"] == ["ALL"], name
            assert "privileged" not in security
            if name.split("/")[0] in LONG_RUNNING:
                assert set(PROBES) <= set(container), name


def test_only_rdma_workers_get_a_capability(release: Release, found: list[Object]) -> None:
    rdma = release.values.get("kv", {}).get("path") == "rdma"
    for _, pod in pod_templates(found):
        for container in pod["spec"]["containers"]:
            added = container["securityContext"]["capabilities"].get("add", [])
            assert added == (
                ["IPC_LOCK"] if rdma and container["name"] in ("worker", "preflight") else []
            )


def test_who_talks_to_the_api_server_may_do_just_that_and_none_reads_service_links(
    found: list[Object],
) -> None:
    roles = {
        each["subjects"][0]["name"]: of_kind(found, "Role")[name]["rules"]
        for name, each in of_kind(found, "RoleBinding").items()
    }
    holders = set()
    for name, pod in pod_templates(found):
        spec = pod["spec"]
        assert spec["enableServiceLinks"] is False, name
        account = spec["serviceAccountName"]
        accounts = [each for each in found if each["kind"] == "ServiceAccount"]
        assert account in [each["metadata"]["name"] for each in accounts], name
        if not spec["automountServiceAccountToken"]:
            continue
        holders.add(account)
        if not is_secrets_job(pod):
            assert pod["metadata"]["labels"]["baton-role"] == "decode", name
            events = [{"apiGroups": [""], "resources": ["events"], "verbs": ["create"]}]
            assert roles[account] == events, "and nothing else"
            names = [each["name"] for each in spec["containers"][0]["env"]]
            assert {"BATON_POD_NAME", "BATON_POD_UID"} <= set(names)
    assert holders == set(roles), "who may call it has a token, and the other way round"


def test_every_workload_has_a_budget_that_lets_nodes_drain(found: list[Object]) -> None:
    budgets = list(of_kind(found, "PodDisruptionBudget").values())
    covered = 0
    for name, pod in pod_templates(found):
        if name.partition("/")[0] not in BUDGETED:
            continue
        labels = pod["metadata"]["labels"]
        chosen = [
            each
            for each in budgets
            if each["spec"]["selector"]["matchLabels"].items() <= labels.items()
        ]
        assert [each["spec"]["maxUnavailable"] for each in chosen] == [1], name
        covered += 1
    assert covered == len(budgets)


def test_selectors_match_their_pods_and_no_others(found: list[Object]) -> None:
    templates = list(pod_templates(found))
    for each in found:
        if each["kind"] not in LONG_RUNNING:
            continue
        wanted = each["spec"]["selector"]["matchLabels"]
        matched = [
            name for name, pod in templates if wanted.items() <= pod["metadata"]["labels"].items()
        ]
        assert matched == [f"{each['kind']}/{each['metadata']['name']}"]
    for service in of_kind(found, "Service").values():
        wanted = service["spec"]["selector"]
        assert any(wanted.items() <= pod["metadata"]["labels"].items() for _, pod in templates)


def test_policies_name_every_reachable_port(release: Release, found: list[Object]) -> None:
    if release.values.get("networkPolicy", {}).get("enabled", True) is False:
        return  # test_planes_without_policies
    policies = [
        each["spec"]
        for each in of_kind(found, "NetworkPolicy").values()
        if each["spec"]["policyTypes"] == ["Ingress"]
    ]
    closed = {"probes", "ranks"}  # a node reaches its own pods; ranks: test_ranks
    if not release.values.get("networkPolicy", {}).get("metrics"):
        closed.add("metrics")
    reached: set[str] = set()
    named: set[str] = set()
    for name, pod in pod_templates(found):
        ports = {
            str(port["containerPort"])
            for container in pod["spec"]["containers"]
            for port in container.get("ports", [])
            if port["name"] not in closed
        }
        if "--allow-kv-over-tcp" in dict(flags_of(pod)):
            ports.add(dict(flags_of(pod))["--kv-ports"])
        labels = pod["metadata"]["labels"].items()
        chosen = [each for each in policies if each["podSelector"]["matchLabels"].items() <= labels]
        admitted = {port_text(each) for spec in chosen for each in ports_of(spec)}
        assert ports <= admitted, name
        reached |= ports
        named |= admitted
    assert named == reached, "a policy admits a port that no pod listens on"


def ports_of(spec: Object, direction: str = "ingress") -> list[Object]:
    return [port for rule in spec[direction] for port in rule.get("ports", [])]


MODEL_AND_STORE = {"443", "6379", "6380"}
CONNECTIONS = {
    "router": {"7400", "7401", "4318"} | MODEL_AND_STORE,
    "worker": {"7400", "7401", "41000-41099", "6443"} | MODEL_AND_STORE,
    "store": set(),
    "secrets": {"443", "6443"},
    "prefetch": {"443"},
    "test": {"8000"},
}


def test_where_egress_is_denied_each_pod_reaches_what_it_needs() -> None:
    (values,) = [each.values for each in RELEASES if each.name == "egress"]
    found = objects(values)
    policies = [
        each
        for each in of_kind(found, "NetworkPolicy").values()
        if each["spec"]["policyTypes"] == ["Egress"]
    ]
    seen = set()
    for name, pod in pod_templates(found):
        labels = pod["metadata"]["labels"]
        chosen = [
            each["spec"]
            for each in policies
            if each["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
        ]
        ports = [port for spec in chosen for port in ports_of(spec, "egress")]
        assert {each.get("protocol") for each in ports if each["port"] == 53} == {"TCP", "UDP"}
        component = labels["app.kubernetes.io/component"]
        assert {port_text(each) for each in ports} == CONNECTIONS[component] | {"53", "3128"}, name
        seen.add(component)
    assert seen == CONNECTIONS.keys()


def test_the_job_before_an_installation_may_reach_the_api_server_before_it_runs() -> None:
    found = objects({"networkPolicy": {"egress": {"enabled": True}}})
    policy = of_kind(found, "NetworkPolicy")["egress-secrets"]["metadata"]["annotations"]
    (job,) = of_kind(found, "Job").values()
    hook = job["metadata"]["annotations"]
    assert policy["helm.sh/hook"] == hook["helm.sh/hook"]
    assert int(policy["helm.sh/hook-weight"]) < int(hook["helm.sh/hook-weight"])


@pytest.mark.parametrize(
    ("values", "router"),
    [
        (
            {"store": {"external": {"urlSecret": {"name": "valkey"}}}},
            {"7400", "7401", "53", "6380"},
        ),
        (
            gpu(model=MODEL | {"hub": {"endpoint": "http://mirror:8081/hub"}}),
            {"7400", "7401", "53", "6379", "6380", "8081"},
        ),
        (
            gpu(router={"settings": {"otlp_endpoint": "https://traces.example/v1/traces"}}),
            {"7400", "7401", "53", "6379", "6380", "443"},
        ),
    ],
)
def test_ports_of_outside_services_follow_their_addresses(values, router: set[str]) -> None:
    peers = [{"ipBlock": {"cidr": "10.0.0.0/8"}}]
    egress = {"enabled": True, "storePort": 6380, "store": peers, "hub": peers, "dns": peers}
    found = of_kind(objects(values | {"networkPolicy": {"egress": egress}}), "NetworkPolicy")
    own = [found[name]["spec"] for name in ("egress", "egress-router")]
    assert {port_text(port) for spec in own for port in ports_of(spec, "egress")} == router
    assert peers in [rule.get("to") for spec in own for rule in spec["egress"]]


def port_text(port: Object) -> str:
    return "-".join(str(port[each]) for each in ("port", "endPort") if each in port)


def flags_of(pod: Object) -> list[tuple[str, str]]:
    args = [each for one in pod["spec"]["containers"] for each in one.get("args", [])]
    return [tuple(each.partition("=")[::2]) for each in args]


def test_mounts_have_volumes(found: list[Object]) -> None:
    for name, pod in pod_templates(found):
        volumes = [each["name"] for each in pod["spec"].get("volumes", [])]
        if name.startswith("StatefulSet"):
            volumes += ["data"] * any(
                "volumeClaimTemplates" in each["spec"]
                for each in found
                if each["kind"] == "StatefulSet"
            )
        assert len(volumes) == len(set(volumes)), name
        for container in pod["spec"]["containers"]:
            mounts = [each["name"] for each in container.get("volumeMounts", [])]
            paths = [each["mountPath"] for each in container.get("volumeMounts", [])]
            assert set(mounts) <= set(volumes), name
            assert len(paths) == len(set(paths)), name
            assert "/tmp" in paths, name


def test_pods_have_time_for_their_requests(release: Release, found: list[Object]) -> None:
    longest = release.values.get("requestTimeoutSeconds", 600)
    for name, pod in pod_templates(found):
        flags = dict(flags_of(pod))
        grace = pod["spec"].get("terminationGracePeriodSeconds")
        if "--drain-grace-s" in flags:
            assert float(flags["--drain-grace-s"]) == longest, name
            assert grace > longest
        if "--lame-duck-s" in flags:
            assert float(flags["--shutdown-grace-s"]) == longest, name
            assert grace > longest + float(flags["--lame-duck-s"]), name


def test_autoscaled_deployments_begin_at_their_minimum(found: list[Object]) -> None:
    for scaler in found:
        if scaler["kind"] not in ("HorizontalPodAutoscaler", "ScaledObject"):
            continue
        spec = scaler["spec"]
        name = spec["scaleTargetRef"]["name"]
        (target,) = [
            each
            for each in found
            if (each["kind"], each["metadata"]["name"]) == ("Deployment", name)
        ]
        least = spec["minReplicas" if "minReplicas" in spec else "minReplicaCount"]
        assert target["spec"]["replicas"] == least, name


def test_an_upgrade_waits_for_a_start_and_keeps_what_serves(found: list[Object]) -> None:
    for name, deployment in of_kind(found, "Deployment").items():
        strategy = deployment["spec"]["strategy"]["rollingUpdate"]
        assert strategy["maxUnavailable"] == 0, name
        if deployment["metadata"]["labels"]["app.kubernetes.io/component"] == "router":
            continue
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        probe = container["startupProbe"]
        start = probe["periodSeconds"] * probe["failureThreshold"]
        assert deployment["spec"]["progressDeadlineSeconds"] > start, name
        assert container["readinessProbe"]["httpGet"]["path"] == "/ready", "routers' admission"
        assert "minReadySeconds" not in deployment["spec"], "nothing else bridges it"


def test_pods_do_not_roll_because_of_the_charts_number(found: list[Object]) -> None:
    for name, pod in pod_templates(found):
        labels: dict[str, Any] = pod["metadata"]["labels"]
        assert not [each for each in labels if re.search(r"version|chart", each)], name


def test_no_secret_is_written_into_a_rendering(found: list[Object]) -> None:
    assert of_kind(found, "Secret") == {}
    secret = re.compile("SECRET|PASSWORD|KEYS?$|TOKEN|URL$")
    for name, pod in pod_templates(found):
        for container in pod["spec"]["containers"]:
            for each in container.get("env", []):
                if secret.search(each["name"]):
                    hidden = "secretKeyRef" in each.get("valueFrom", {})
                    assert hidden or "$(BATON_STORE_PASSWORD)" in each["value"], name
