"""Values that cannot work are refused, with words that say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.chart.chart import CHART_FOLDER, RefusedError, render
from tests.chart.releases import GPU, METRIC, MODEL, POOLS, gpu
from tests.effort import some

Values = dict[str, Any]


def spanning(**pool: Any) -> Values:
    """A release with only a pool of decode workers."""
    return {"pools": {"decode": {"role": "decode", **pool}}}


BY_SCHEMA: list[tuple[Values, str]] = [
    ({"kv": {"path": "ib"}}, "at '/kv/path': value must be one of '', 'rdma', 'tcp'"),
    ({"replicas": 3}, "additional properties 'replicas' not allowed"),
    ({"router": {"replicas": "two"}}, "at '/router/replicas': got string, want integer"),
    ({"router": {"replicas": 0}}, "at '/router/replicas': minimum: got 0, want 1"),
    ({"pools": {"a": {"replicas": 1}}}, "at '/pools/a': missing property 'role'"),
    ({"pools": {"a": {"role": "both"}}}, "value must be one of 'prefill', 'decode'"),
    ({"pools": {"A_b": {"role": "decode"}}}, "'A_b' does not match pattern"),
    ({"workers": {"device": "gpu"}}, "at '/workers/device': value must be one of 'cpu', 'cuda'"),
    (
        {"pools": {"a": {"role": "prefill", "settings": {"num_block": 3}}}},
        "at '/pools/a/settings': additional properties 'num_block' not allowed",
    ),
    (
        {"pools": {"a": {"role": "prefill", "settings": {"resume_grace_s": 3}}}},
        "at '/pools/a/settings': additional properties 'resume_grace_s' not allowed",
    ),
    (
        {"workers": {"settings": {"kv_dtype": "fp4"}}},
        "at '/workers/settings/kv_dtype': value must be one of 'auto', 'fp8'",
    ),
    ({"workers": {"tensorParallel": 0}}, "at '/workers/tensorParallel': minimum: got 0, want 1"),
    ({"workers": {"settings": {"model": "x"}}}, "additional properties 'model' not allowed"),
    ({"router": {"settings": {"max_attempts": 0}}}, "max_attempts': minimum: got 0, want 1"),
    ({"router": {"settings": {"api_keys": ["k"]}}}, "additional properties 'api_keys'"),
    ({"image": {"digest": "sha256:12"}}, "at '/image/digest': 'sha256:12' does not match"),
    ({"model": {"cache": {"type": "node"}}}, "one of '', 'hostPath', 'pvc', 'emptyDir'"),
    ({"model": {"id": "https://huggingface.co/x/y"}}, "at '/model/id'"),
    ({"kv": {"ports": "41000"}}, "at '/kv/ports': '41000' does not match pattern"),
    (
        {"prometheusRule": {"runbookUrl": "docs/observability.md"}},
        "at '/prometheusRule/runbookUrl': 'docs/observability.md' does not match pattern",
    ),
    ({"logLevel": "trace"}, "'debug', 'info', 'warning', 'error'"),
    ({"nameOverride": "a" * 41}, "at '/nameOverride': maxLength: got 41, want 40"),
    ({"image": {"tag": 1.10}}, "at '/image/tag': got number, want string"),
    (
        {"router": {"podLabels": {"a": ["b"]}}},
        "at '/router/podLabels/a': got array, want null or boolean or number or string",
    ),
    (
        {"store": {"tolerations": [{"key": "a", "operator": "Equal", "value": True}]}},
        "at '/store/tolerations/0/value': got boolean, want string",
    ),
    (
        {"networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"a": 1}}}]}},
        "matchLabels/a': got number, want string",
    ),
    (
        {
            "router": {
                "affinity": {"nodeAffinity": {"x": [{"matchExpressions": [{"values": [1]}]}]}}
            }
        },
        "values/0': got number, want string",
    ),
    ({"jobs": {"podLabels": {"team": "AI team"}}}, "at '/jobs/podLabels/team': 'AI team' does not"),
    ({"ingress": {"enabled": True, "host": "AI.example"}}, "at '/ingress/host': 'AI.example'"),
    ({"serviceMonitor": {"interval": "0s"}}, "at '/serviceMonitor/interval': '0s' does not match"),
    ({"router": {"env": [{"value": "x"}]}}, "at '/router/env/0': missing property 'name'"),
    ({"jobs": {"resources": {"limits": {"memory": "1 Gi"}}}}, "'1 Gi' does not match pattern"),
    ({"workers": {"shmSize": "256MB"}}, "'256MB' does not match pattern"),
    ({"workers": {"maxSurge": "0%"}}, "'0%' does not match pattern"),
    (
        {"workers": {"autoscaling": {"scaleDownSeconds": 3601}}},
        "at '/workers/autoscaling/scaleDownSeconds': maximum: got 3,601, want 3,600",
    ),
    ({"router": {"service": {"port": 70000}}}, "at '/router/service/port': maximum"),
    ({"router": {"lameDuckSeconds": 3601}}, "at '/router/lameDuckSeconds': maximum"),
]

BY_TEMPLATE: list[tuple[Values, str]] = [
    (
        {"requirePrefill": True, "pools": {"decode": {"role": "decode"}}},
        "requirePrefill: there is no pool with role prefill",
    ),
    ({"podConditions": True, "podEvents": False}, "podConditions: workers write conditions as"),
    (gpu(kv={}), "kv.path: say how KV blocks move between pods: rdma, or tcp"),
    (
        gpu(kv={"path": "rdma"}),
        "kv.interfaces: name the RDMA ports for KV blocks",
    ),
    (
        gpu(workers={"device": "cuda"}),
        "pools.prefill: kv.path is rdma, and its pods get no RDMA device; set workers.rdma",
    ),
    (gpu(model=MODEL | {"sizeGi": 0}), "model.sizeGi: give the size of the weights in GiB"),
    (gpu(model=MODEL | {"cache": {}}), "model.cache.type: say where downloaded weights"),
    ({"model": {"revision": "v1"}}, "model.revision: only a model of the hub"),
    (
        gpu(model=MODEL | {"pvc": {"claimName": "models"}}),
        "model.id, model.pvc: a release serves one model from one place",
    ),
    (
        gpu(model=MODEL | {"cache": {"type": "emptyDir", "prefetch": True}}),
        "model.cache.prefetch: it needs model.id",
    ),
    (gpu(pools={"only": {"role": "prefill"}}), "pools: a release needs a pool with role decode"),
    (gpu(pools={"router": {"role": "decode"}}), "pools.router: the chart uses this name itself"),
    (
        gpu(pools=POOLS | {"decode": {"role": "decode", "autoscaling": {"type": "hpa"}}}),
        "pools.decode.autoscaling.metrics: name the metrics that the HPA follows",
    ),
    (
        gpu(pools=POOLS | {"decode": {"role": "decode", "autoscaling": {"type": "keda"}}}),
        "pools.decode.autoscaling.triggers: name the triggers",
    ),
    (gpu(workers=GPU | {"hugepages": {"size": "2Mi"}}), "hugepages.amount: say how much memory"),
    (
        {"workers": {"tiers": {"disk": {"size": "5Gi"}}}},
        "tiers.host: blocks reach the disk through",
    ),
    (
        {"workers": {"tiers": {"host": "1Gi", "disk": {"size": "5Gi", "type": "pvc"}}}},
        "tiers.disk.claimName: name the claim",
    ),
    (
        {"workers": {"tiers": {"host": "4Gi"}, "resources": {"limits": {"memory": "2Gi"}}}},
        "4Gi of host memory do not fit into resources.limits.memory, 2Gi",
    ),
    (
        spanning(tensorParallel=3, nodesPerWorker=2),
        "pools.decode.nodesPerWorker: 2 must divide the 3 ranks",
    ),
    (
        spanning(tensorParallel=3, pipelineParallel=2, nodesPerWorker=3),
        "pools.decode.nodesPerWorker: 2 ranks in each pod are neither whole stages",
    ),
    (
        spanning(tensorParallel=2, nodesPerWorker=2, tiers={"host": "1Gi"}),
        "pools.decode.tiers: workers of several nodes have no tiers",
    ),
    (
        spanning(
            tensorParallel=2, nodesPerWorker=2, autoscaling={"type": "hpa", "metrics": [METRIC]}
        ),
        "pools.decode.autoscaling: a pool of workers that span several nodes has a fixed size",
    ),
    (
        gpu(pools={"decode": {"role": "decode", "tensorParallel": 2, "nodesPerWorker": 2}}),
        "pools.decode.nodesPerWorker: ranks on cards lie on one node",
    ),
    (
        spanning(tensorParallel=4, nodesPerWorker=4) | {"preflight": {"enabled": True}},
        "preflight.pods: its pods stand for those of one worker of the pool decode; set 4",
    ),
    (
        {"inferencePool": {"enabled": True}},
        "inferencePool.endpointPickerRef: name the Service of your endpoint picker",
    ),
    (
        {"inferencePool": {"enabled": True, "endpointPickerRef": {"name": "epp"}}},
        "inferencePool.endpointPickerRef.port: give the port of the picker's Service",
    ),
    ({"httpRoute": {"enabled": True}}, "httpRoute.parentRefs: name the Gateway"),
    (
        {"ingress": {"enabled": True, "path": "/llm"}},
        "ingress.path: the routers serve at /, so the controller must remove /llm",
    ),
]

BY_VERSION: list[tuple[Values, str, str]] = [
    (
        gpu(model={"image": {"reference": "r/m:1"}, "sizeGi": 1, "cache": {"type": "pvc"}}),
        "1.30.9",
        "image volumes need Kubernetes 1.31 or later, and this is v1.30.9; use model.pvc",
    ),
    (
        gpu(workers={"device": "cuda", "dra": {"deviceClass": "gpu.nvidia.com"}}),
        "1.33.0",
        "claims of devices (resource.k8s.io/v1) need Kubernetes 1.34 or later, and this is v1.33.0",
    ),
]


@pytest.mark.parametrize(("values", "message"), [*BY_SCHEMA, *BY_TEMPLATE])
def test_wrong_values_are_refused(values: Values, message: str) -> None:
    with pytest.raises(RefusedError) as refused:
        render(values)
    assert message in str(refused.value)


@pytest.mark.parametrize(("values", "version", "message"), BY_VERSION)
def test_what_is_newer_than_the_cluster_is_refused(
    values: Values, version: str, message: str
) -> None:
    with pytest.raises(RefusedError) as refused:
        render(values, version)
    assert message in str(refused.value)
    render(values, "1.34.0")


def paths(values: Values, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every value, sections included."""
    for name, value in values.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from paths(value, (*above, name))


def refusal_of(values: Values) -> str | None:
    """Why the chart refuses the values; None if it does not."""
    try:
        render(values)
    except RefusedError as error:
        return str(error)
    return None


DEFAULTS = yaml.safe_load((CHART_FOLDER / "values.yaml").read_text())


@pytest.mark.parametrize("path", some(paths(DEFAULTS), 14), ids=".".join)
def test_a_value_that_is_taken_away_is_not_needed_or_missed(path: tuple[str, ...]) -> None:
    """As by a section of a file whose lines are all comments."""
    *parents, last = path
    values: Values = {last: None}
    for name in reversed(parents):
        values = {name: values}
    where = "/" + "/".join(parents) if parents else ""
    refusal = refusal_of(values)
    assert refusal is None or f"at '{where}': missing property '{last}'" in refusal


def test_all_that_is_wrong_is_said_at_once() -> None:
    values = {"model": {"id": "a/b"}, "httpRoute": {"enabled": True}}
    with pytest.raises(RefusedError) as refused:
        render(values)
    for name in ("model.sizeGi", "model.cache.type", "kv.path", "httpRoute.parentRefs"):
        assert f"\n- {name}: " in str(refused.value)
