"""Numbers that cannot work together are refused with the value to set, and that value is taken."""

from __future__ import annotations

from typing import Any

import pytest

from router_process.settings import RouterSettings
from tests.chart.chart import NEWEST, RefusedError, objects, parsed, render
from tests.chart.kube_schemas import problems
from tests.chart.releases import METRIC, RDMA, gpu

Values = dict[str, Any]
MIB = 1 << 20
TRIGGER = {"type": "cron", "metadata": {"start": "0 8 * * *"}}


def scaled(kind: str, least: int, most: int = 4) -> Values:
    """Autoscaling of a pool."""
    follows = {"hpa": {"metrics": [METRIC]}, "keda": {"triggers": [TRIGGER]}}[kind]
    return {"type": kind, "minReplicas": least, "maxReplicas": most} | follows


def pools(**scaling: Values) -> Values:
    """A pool of each role, with this autoscaling."""
    both = {role: {"role": role} for role in ("prefill", "decode")}
    return gpu(
        pools={role: pool | {"autoscaling": scaling.get(role, {})} for role, pool in both.items()}
    )


def keeping(num_bytes: int, **store: Any) -> Values:
    """A release whose store keeps so many bytes of responses."""
    settings = {"responses_store": True, "responses_store_bytes": num_bytes}
    return {"router": {"settings": settings}, "store": store}


REFUSED: list[tuple[Values, str, Values]] = [
    ({"enabled": False}, "enabled: only the condition of a parent chart", {"enabled": True}),
    (
        gpu(kv=RDMA | {"ports": "41000-70000"}),
        "kv.ports: 41000-70000 ends beyond 65535, the last port; set 41000-65535",
        gpu(kv=RDMA | {"ports": "41000-65535"}),
    ),
    (
        gpu(kv=RDMA | {"ports": "42000-41000"}),
        "kv.ports: 42000-41000 is not a range of ports from low to high; set 41000-41099",
        gpu(kv=RDMA | {"ports": "41000-41099"}),
    ),
    (
        gpu(kv=RDMA | {"ports": "80-99"}),
        "kv.ports: 80-99 begins below 1024",
        gpu(kv=RDMA | {"ports": "1024-1099"}),
    ),
    (
        gpu(kv=RDMA | {"ports": "7000-9000"}),
        "kv.ports: 7000-9000 includes 7400, a worker's port for control; set 41000-41099",
        gpu(kv=RDMA | {"ports": "7402-9000"}),
    ),
    (
        {"requestTimeoutSeconds": 100000},
        "requestTimeoutSeconds: 100000 s are more than a day",
        {"requestTimeoutSeconds": 86400},
    ),
    (
        pools(decode=scaled("keda", 0)),
        "pools.decode.autoscaling.minReplicas: without any decode worker routers refuse all",
        pools(decode=scaled("keda", 1)),
    ),
    (
        pools(prefill=scaled("hpa", 0)),
        "pools.prefill.autoscaling.minReplicas: an HPA does not scale to 0; set 1, or type keda",
        pools(prefill=scaled("keda", 0)),
    ),
    (
        pools(prefill=scaled("keda", 0)) | {"requirePrefill": True},
        "pools.prefill.autoscaling.minReplicas: with requirePrefill no decode worker is ready",
        pools(prefill=scaled("keda", 1)) | {"requirePrefill": True},
    ),
    (
        pools(decode=scaled("hpa", 3, most=2)),
        "pools.decode.autoscaling: maxReplicas is less than minReplicas; set maxReplicas: 3",
        pools(decode=scaled("hpa", 3, most=3)),
    ),
    (
        {"router": {"autoscaling": {"enabled": True, "minReplicas": 9}}},
        "router.autoscaling: maxReplicas is less than minReplicas; set maxReplicas: 9",
        {"router": {"autoscaling": {"enabled": True, "minReplicas": 9, "maxReplicas": 9}}},
    ),
    (
        keeping(1024 * MIB, persistence={"size": "8Gi"}),
        "set store.resources.limits.memory: 2176Mi, or responses_store_bytes: 134217728\n",
        keeping(
            1024 * MIB,
            resources={"limits": {"memory": "2176Mi"}},
            persistence={"size": "8Gi"},
        ),
    ),
    (
        keeping(1024 * MIB, resources={"limits": {"memory": "4G"}}),
        "set store.persistence.size: 4096Mi, or responses_store_bytes: 268435456\n",
        keeping(256 * MIB, resources={"limits": {"memory": "4G"}}),
    ),
    (
        {"image": {"repository": "registry.example:5000/ai/baton:v1"}},
        "set image.repository: registry.example:5000/ai/baton and image.tag: v1\n",
        {"image": {"repository": "registry.example:5000/ai/baton", "tag": "v1"}},
    ),
    (
        gpu(pools={"d": {"role": "decode", "image": {"repository": "r/b:2", "tag": "3"}}}),
        "pools.d.image.repository: r/b:2 ends in a tag, which has a value of its own",
        gpu(pools={"d": {"role": "decode", "image": {"repository": "r/b", "tag": "3"}}}),
    ),
    (
        {"router": {"podLabels": {"app.kubernetes.io/instance": "x"}}},
        "router.podLabels: the chart sets app.kubernetes.io/instance itself",
        {"router": {"podLabels": {"app.kubernetes.io/part-of": "x"}}},
    ),
    (
        {"router": {"volumes": [{"name": "tmp", "emptyDir": {}}]}},
        "router.volumes: the chart has its own volume tmp; take another name",
        {"router": {"volumes": [{"name": "own", "emptyDir": {}}]}},
    ),
    (
        gpu(pools={"d": {"role": "decode", "podLabels": {"baton-pool": "x"}}}),
        "pools.d.podLabels: the chart sets baton-pool itself",
        gpu(pools={"d": {"role": "decode", "podLabels": {"pool": "x"}}}),
    ),
]


@pytest.mark.parametrize(("values", "message", "instead"), REFUSED)
def test_a_value_out_of_range_is_refused_with_one_that_works(
    values: Values, message: str, instead: Values
) -> None:
    with pytest.raises(RefusedError) as refused:
        render(values)
    assert message in str(refused.value)
    wrong = [each for one in parsed(render(instead)) for each in problems(one, NEWEST)]
    assert wrong == []


def test_a_pool_may_sleep_while_another_one_of_its_role_is_awake() -> None:
    values = gpu(
        pools={
            "day": {"role": "decode", "autoscaling": scaled("keda", 0)},
            "base": {"role": "decode", "replicas": 1},
        }
    )
    assert objects(values)


def test_the_longest_request_has_a_timeout_that_gateways_take() -> None:
    route = {"enabled": True, "parentRefs": [{"name": "gateway"}]}
    for one in objects({"requestTimeoutSeconds": 86400, "httpRoute": route}):
        assert problems(one, NEWEST) == []


def test_the_chart_knows_how_much_a_router_keeps_by_default() -> None:
    kept = RouterSettings.__dataclass_fields__["responses_store_bytes"].default
    small = {"limits": {"memory": 2 * kept - 1}}
    with pytest.raises(RefusedError) as refused:
        render({"router": {"settings": {"responses_store": True}}, "store": {"resources": small}})
    assert f"responses_store_bytes: {kept} bytes of kept responses" in str(refused.value)
    assert objects({"router": {"settings": {"responses_store": True}}})
