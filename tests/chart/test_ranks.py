"""Pools whose workers split their model over ranks and stages."""

from __future__ import annotations

from typing import Any

from tests.chart.chart import Object, objects, pod_templates
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
