"""Pools whose workers split their model over ranks and stages."""

from __future__ import annotations

from typing import Any

from tests.chart.chart import Object, objects, of_kind, pod_templates
from tests.chart.releases import GPU, gpu

SPLIT = ("--tensor-parallel", "--pipeline-parallel", "--peer-", "--kv-order", "--kv-windows")
SHARED = {"kv_order": "tokens", "kv_windows": "window"}
RANKS = {
    "workers": {"pipelineParallel": 2},
    "pools": {
        "prefill": {"role": "prefill", "tensorParallel": 2},
        "decode": {"role": "decode", "pipelineParallel": 1},
        "other": {"role": "decode", "pipelineParallel": 1, "settings": SHARED},
    },
}


def workers(values: dict[str, Any]) -> dict[str, Object]:
    """The container of each pool."""
    return {
        name.rpartition("-")[2]: template["spec"]["containers"][0]
        for name, template in pod_templates(objects(values))
        if template["spec"]["containers"][0].get("command", [""])[-1] in ("prefill", "decode")
    }


def split(container: Object) -> list[str]:
    return [flag for flag in container["args"] if flag.startswith(SPLIT)]


def test_each_pool_splits_its_model_and_all_keep_blocks_that_can_be_split() -> None:
    found = workers(RANKS)
    assert split(found["prefill"]) == [
        "--tensor-parallel=2",
        "--pipeline-parallel=2",
        "--peer-tensor-parallel=1",
        "--peer-pipeline-parallel=1",
        "--kv-order=pairs",
    ]
    peers = ["--peer-tensor-parallel=2", "--peer-pipeline-parallel=2"]
    assert split(found["decode"]) == [*peers, "--kv-order=pairs"]
    assert split(found["other"]) == [*peers, "--kv-order=tokens", "--kv-windows=window"]
    assert [split(each) for each in workers({}).values()] == [[], []]


def test_each_rank_has_a_core_and_memory_of_its_own() -> None:
    found = workers(RANKS)
    of_four, alone = (found[name]["resources"] for name in ("prefill", "decode"))
    assert (of_four["requests"]["cpu"], of_four["limits"]["cpu"]) == ("4", "8")
    assert (alone["requests"]["cpu"], alone["limits"]["cpu"]) == ("1", "2")
    mebibytes = [int(each["limits"]["memory"].removesuffix("Mi")) for each in (of_four, alone)]
    assert mebibytes[0] - mebibytes[1] == 3 * 1024


def test_a_worker_of_several_ranks_may_have_tiers() -> None:
    tiers = {"host": "1Gi", "disk": {"size": "5Gi"}}
    found = workers({"workers": {"tensorParallel": 2, "tiers": tiers}})["decode"]
    flags = [flag.partition("=")[0] for flag in found["args"]]
    assert {"--tensor-parallel", "--host-tier-bytes", "--disk-tier-bytes"} <= set(flags)
    alone = workers({"workers": {"tensorParallel": 2}})["decode"]
    memory = [int(each["resources"]["limits"]["memory"][:-2]) for each in (found, alone)]
    assert memory[0] - memory[1] == 1024


FOUR_CARDS = {"decode": {"role": "decode", "tensorParallel": 2, "pipelineParallel": 2}}


def test_a_worker_of_several_ranks_asks_for_as_many_cards() -> None:
    pools = {"prefill": None, **FOUR_CARDS}
    assert workers(gpu(pools=pools))["decode"]["resources"]["limits"]["nvidia.com/gpu"] == 4
    dra = {"device": "cuda", "dra": {"deviceClass": "gpu.example", "nicDeviceClass": "nic.example"}}
    (claim,) = (
        each
        for each in objects(gpu(pools=pools, workers=GPU | dra), "1.34.0")
        if each["kind"] == "ResourceClaimTemplate"
    )
    devices = claim["spec"]["spec"]["devices"]
    assert [each["exactly"]["count"] for each in devices["requests"]] == [4, 1]
    assert "constraints" not in devices, "no root of PCIe has all four"


SPAN = {
    "workers": {"tensorParallel": 2, "pipelineParallel": 2, "nodesPerWorker": 2, "replicas": 2},
    "pools": {"decode": {"role": "decode"}, "small": {"role": "decode", "nodesPerWorker": 1}},
}


def test_a_worker_that_spans_nodes_is_a_group_of_a_leader_worker_set() -> None:
    found = objects(SPAN)
    assert set(of_kind(found, "Deployment")) == {"router", "small"}
    (group,) = of_kind(found, "LeaderWorkerSet").values()
    template = group["spec"]["leaderWorkerTemplate"]
    assert (group["spec"]["replicas"], template["size"]) == (2, 2)
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    container = workers(SPAN)["decode"]
    flags = dict(flag.split("=", 1) for flag in container["args"] if "=" in flag)
    assert (flags["--tensor-parallel"], flags["--pipeline-parallel"]) == ("2", "2")
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert flags["--master-port"] == str(ports["ranks"])
    assert container["resources"]["requests"]["cpu"] == "2", "of the worker's four ranks"
    revisions = [each for each in container["env"] if each["name"] == "BATON_DEPLOYMENT_REVISION"]
    assert "leaderworkerset" in revisions[0]["valueFrom"]["fieldRef"]["fieldPath"]
    alone = workers(SPAN)["small"]
    assert not [each for each in alone["args"] if each.startswith("--master")]
    assert "ranks" not in [each["name"] for each in alone["ports"]]


def test_ranks_of_one_worker_reach_each_other_and_nobody_else_does() -> None:
    """Also those of a worker that is started while another one is replaced."""
    egress = {"networkPolicy": {"egress": {"enabled": True}}}
    for values, kinds in ((SPAN, ["Ingress"]), (SPAN | egress, ["Ingress", "Egress"])):
        policies = of_kind(objects(values), "NetworkPolicy")
        own = {name: each["spec"] for name, each in policies.items() if "-ranks-" in name}
        assert set(own) == {f"decode-ranks-{number}" for number in range(3)}
        for number in range(3):
            spec = own[f"decode-ranks-{number}"]
            group = spec["podSelector"]
            assert group["matchLabels"] == {
                "leaderworkerset.sigs.k8s.io/name": "demo-baton-decode",
                "leaderworkerset.sigs.k8s.io/group-index": str(number),
            }
            assert spec["policyTypes"] == kinds
            assert spec["ingress"] == [{"from": [{"podSelector": group}]}]
            assert spec.get("egress", []) == [{"to": [{"podSelector": group}]}] * (len(kinds) - 1)


def test_the_preflight_connects_the_ranks_of_one_worker() -> None:
    """Its pods have the names of an Indexed Job's pods in the subdomain of a headless Service."""
    egress = {"networkPolicy": {"egress": {"enabled": True}}}
    for values, kinds in ((SPAN, ["Ingress"]), (SPAN | egress, ["Ingress", "Egress"])):
        found = objects(values | {"preflight": {"enabled": True, "pool": "decode"}})
        (job,) = (each for name, each in of_kind(found, "Job").items() if "preflight" in name)
        pod, run = job["spec"]["template"]["spec"], job["metadata"]["name"]
        (container,) = pod["containers"]
        flags = dict(flag.split("=", 1) for flag in container["args"] if "=" in flag)
        service = of_kind(found, "Service")[pod["subdomain"].removeprefix("demo-baton-")]
        assert service["spec"]["clusterIP"] == "None"
        labels = job["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()
        assert flags["--master-addr"] == f"{run}-0.{pod['subdomain']}"
        sizes = ("--nnodes", "--tensor-parallel", "--pipeline-parallel")
        assert [flags[each] for each in sizes] == ["2", "2", "2"]
        assert f"--master-port={flags['--master-port']}" in workers(SPAN)["decode"]["args"]
        policy = of_kind(found, "NetworkPolicy")["preflight"]["spec"]
        pods = [{"podSelector": {"matchLabels": {"baton-run": run}}}]
        assert policy["podSelector"] == pods[0]["podSelector"]
        assert policy["policyTypes"] == kinds
        assert policy["ingress"] == [{"from": pods}]
        assert policy.get("egress", []) == [{"to": pods}] * (len(kinds) - 1)
    alone = objects(SPAN | {"preflight": {"enabled": True, "pool": "small"}})
    assert "preflight" not in of_kind(alone, "NetworkPolicy")


def test_without_other_policies_the_ranks_keep_the_ports_of_the_worker_open() -> None:
    values = SPAN | {"networkPolicy": {"enabled": False}}
    policies = of_kind(objects(values), "NetworkPolicy")
    first, _ = policies["decode-ranks-0"]["spec"]["ingress"]
    assert "from" not in first
    assert {each["port"] for each in first["ports"]} == {7400, 7401, 9400, 9401}
