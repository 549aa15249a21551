"""Who reaches a release's routers and workers, and under which names and paths."""

from __future__ import annotations

import pytest

from tests.chart.chart import (
    objects,
    of_kind,
    pod_templates,
)
from tests.chart.pods import container, release
from tests.chart.releases import gpu


def test_planes_without_policies() -> None:
    """Over TCP the KV plane keeps its policy, and that one then closes no other port."""
    found = of_kind(release("open"), "NetworkPolicy")
    assert set(found) == {"kv"}
    any_peer, kv = found["kv"]["spec"]["ingress"]
    assert "from" not in any_peer
    assert {port["port"] for port in any_peer["ports"]} == {7400, 7401, 9400, 9401}
    assert kv["from"][0]["podSelector"]["matchExpressions"][0]["values"] == ["worker"]
    rdma = objects(gpu(networkPolicy={"enabled": False}))
    assert of_kind(rdma, "NetworkPolicy") == {}


def test_the_nginx_ingress_lets_streams_pass_and_removes_the_prefix() -> None:
    (ingress,) = of_kind(release("tls-and-keys"), "Ingress").values()
    annotations = ingress["metadata"]["annotations"]
    prefix = "nginx.ingress.kubernetes.io/"
    assert annotations[prefix + "proxy-buffering"] == "off"
    assert annotations[prefix + "proxy-read-timeout"] == "630"
    assert annotations[prefix + "rewrite-target"] == "/$2"
    assert annotations[prefix + "backend-protocol"] == "HTTPS"
    (path,) = ingress["spec"]["rules"][0]["http"]["paths"]
    assert path["path"] == "/llm(/|$)(.*)"


def test_the_route_leads_to_the_pool_and_outlasts_requests() -> None:
    (route,) = of_kind(release("gateway"), "HTTPRoute").values()
    (rule,) = route["spec"]["rules"]
    assert rule["backendRefs"][0]["kind"] == "InferencePool"
    assert rule["timeouts"] == {"request": "630s"}
    assert rule["filters"][0]["urlRewrite"]["path"]["replacePrefixMatch"] == "/"
    assert rule["backendRefs"][0].keys() == {"group", "kind", "name", "weight"}, "all defaults"
    assert {"group", "kind"} <= route["spec"]["parentRefs"][0].keys(), "which tools compare"
    (pool,) = of_kind(release("gateway"), "InferencePool").values()
    router = of_kind(release("gateway"), "Deployment")["router"]["spec"]["template"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= router["metadata"]["labels"].items()


def test_only_peers_that_are_named_reach_the_workers_metrics() -> None:
    prometheus = {"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}
    for metrics in ([], [prometheus]):
        found = of_kind(objects({"networkPolicy": {"metrics": metrics}}), "NetworkPolicy")
        on_workers = [
            each["spec"]
            for each in found.values()
            if each["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "worker"
        ]
        rules = [rule for each in on_workers for rule in each["ingress"]]
        reached = [r for r in rules if {9400, 9401} & {port["port"] for port in r["ports"]}]
        assert [each["from"] for each in reached] == ([metrics] if metrics else [])


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({}, None),
        ({"ingress": {"enabled": True}}, None),
        ({"ingress": {"enabled": True, "path": "/llm/", "controller": "nginx"}}, "/llm"),
        ({"httpRoute": {"enabled": True, "path": "/a/b", "parentRefs": [{"name": "g"}]}}, "/a/b"),
        (
            {
                "ingress": {"enabled": True, "path": "/llm", "controller": "nginx"},
                "router": {"settings": {"root_path": "/other"}},
            },
            "/other",
        ),
    ],
)
def test_routers_know_the_path_under_which_clients_see_them(values, path: str | None) -> None:
    args = container(values, "router")["args"]
    given = [each for each in args if each.startswith("--root-path=")]
    assert given == ([] if path is None else [f"--root-path={path}"])


def test_ports_name_their_protocol() -> None:
    """Server-side apply needs it: it is part of the key of a list of ports."""
    for found in release("everything"):
        if found["kind"] == "Service":
            assert all("protocol" in port for port in found["spec"]["ports"])
    for _, found in pod_templates(release("everything")):
        ports = [port for each in found["spec"]["containers"] for port in each.get("ports", [])]
        assert all("protocol" in port for port in ports)


OWN_HOSTS = ["demo-baton", *(f"demo-baton.ai{end}" for end in ("", ".svc", ".svc.cluster.local"))]


@pytest.mark.parametrize(
    ("values", "hosts"),
    [
        ({}, OWN_HOSTS),
        ({"ingress": {"enabled": True, "host": "llm.example"}}, [*OWN_HOSTS, "llm.example"]),
        (
            {
                "httpRoute": {
                    "enabled": True,
                    "parentRefs": [{"name": "gateway"}],
                    "hostnames": ["*.llm.example"],
                },
                "router": {"settings": {"allowed_hosts": ["lb.example"]}},
            },
            [*OWN_HOSTS, "*.llm.example", "lb.example"],
        ),
        ({"router": {"apiKeys": {"enabled": True}}}, None),
        ({"router": {"env": [{"name": "BATON_API_KEYS", "value": "k" * 20}]}}, None),
        (
            {"router": {"apiKeys": {"enabled": True}, "settings": {"allowed_hosts": ["a", "b"]}}},
            ["a", "b"],
        ),
    ],
)
def test_routers_without_keys_answer_under_the_releases_names(values, hosts) -> None:
    router = {"apiKeys": {"enabled": False}} | values.get("router", {})
    args = container(values | {"router": router}, "router")["args"]
    given = [each.partition("=")[2].split(",") for each in args if "allowed-hosts" in each]
    assert given == ([] if hosts is None else [hosts])
