"""Which host of a worker this is, by settings or by a LeaderWorkerSet, and what has to fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from decode_worker.settings import DecodeSettings
from engine.engine_config import EngineConfig
from protocol.errors import ConfigError
from protocol.messages import Role
from scheduling.scheduler import SchedulerConfig
from tests.paths import DEMO_MODEL
from worker.startup.nodes import own_address, placed, ranks_of, terms_of

LWS = {
    "LWS_LEADER_ADDRESS": "demo-0.demo.ai",
    "LWS_GROUP_SIZE": "2",
    "LWS_WORKER_INDEX": "1",
}
HEAD = "192.0.2.7"


def settings(**given: Any) -> DecodeSettings:
    needed = {"model": str(DEMO_MODEL), "redis_url": "redis://store", "cluster_secret": "s" * 16}
    return DecodeSettings(**needed, **{"device": "cpu", "tensor_parallel": 2, **given})


def test_a_leader_worker_set_gives_the_same_as_flags() -> None:
    flags = settings(nnodes=2, node_rank=1, master_addr="demo-0.demo.ai")
    assert placed(settings(), LWS) == placed(flags, {}) == flags
    other = placed(settings(nnodes=2, node_rank=0, master_addr=HEAD), LWS)
    assert (other.node_rank, other.master_addr) == (0, HEAD), "flags count"
    alone = placed(settings(), {})
    assert (alone.num_nodes, alone.is_head) == (1, True)


@pytest.mark.parametrize(
    ("given", "environ", "said"),
    [
        ({"nnodes": 2, "node_rank": 2}, {}, "node_rank 2: 2 hosts .* have the numbers 0 to 1"),
        ({"node_rank": 1}, {}, "node_rank 1: 1 hosts"),
        ({"nnodes": 2}, {}, "nnodes 2 needs master_addr"),
        ({"nnodes": 2, "master_addr": "0.0.0.0"}, {}, "0.0.0.0 is no address of a host"),
        ({"nnodes": 3, "master_addr": HEAD}, {}, "nnodes 3 must divide the 2 ranks"),
        (
            {"tensor_parallel": 3, "pipeline_parallel": 2, "nnodes": 3, "master_addr": HEAD},
            {},
            "2 ranks on each host are neither whole stages of tensor_parallel 3",
        ),
        ({"nnodes": 2, "master_addr": HEAD, "transport": "shm"}, {}, "transport shm stays on one"),
        ({"nnodes": 2, "master_addr": HEAD, "kv_checksum": True}, {}, "leave kv_checksum out"),
        (
            {"nnodes": 2, "master_addr": HEAD, "host_tier_bytes": 1},
            {},
            "leave host_tier_bytes, disk_tier_bytes and disk_tier_dir out",
        ),
        ({}, {**LWS, "LWS_GROUP_SIZE": "\N{SUPERSCRIPT TWO}"}, "which is no number"),
        ({}, {**LWS, "LWS_WORKER_INDEX": "one"}, "LWS_WORKER_INDEX is one, which is no number"),
        ({}, {**LWS, "LWS_GROUP_SIZE": "3"}, "nnodes 3 must divide the 2 ranks"),
    ],
)
def test_what_does_not_fit_is_refused(
    given: dict[str, Any], environ: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        placed(settings(**given), environ)


@pytest.mark.parametrize(
    ("tp_size", "num_stages", "nodes", "ranks"),
    [(2, 1, 2, [[0], [1]]), (2, 2, 2, [[0, 1], [2, 3]]), (4, 1, 2, [[0, 1], [2, 3]])],
)
def test_ranks_lie_on_hosts_in_their_order(
    tp_size: int, num_stages: int, nodes: int, ranks: list[list[int]]
) -> None:
    given = settings(
        tensor_parallel=tp_size, pipeline_parallel=num_stages, nnodes=nodes, master_addr=HEAD
    )
    found = placed(given, {})
    assert [list(ranks_of(found, node)) for node in range(nodes)] == ranks


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ({"node_rank": 0, "master_addr": HEAD}, HEAD),
        ({"node_rank": 0, "host": "192.0.2.8", "master_addr": "head.example"}, "192.0.2.8"),
        ({"node_rank": 1, "host": "192.0.2.8", "master_addr": HEAD}, "192.0.2.8"),
        (
            {"node_rank": 1, "host": "0.0.0.0", "advertise_address": "192.0.2.9"},
            "192.0.2.9",
        ),
        ({"node_rank": 1, "master_addr": "127.0.0.1"}, "127.0.0.1"),
    ],
)
def test_ranks_of_other_hosts_connect_to_one_address(given: dict[str, Any], address: str) -> None:
    assert own_address(settings(**{"nnodes": 2, "master_addr": HEAD, **given})) == address


def test_terms_differ_with_all_that_steps_depend_on() -> None:
    scheduler = SchedulerConfig(block_size=16, max_batch_size=4, chunk_max_tokens=64)
    config = EngineConfig(DEMO_MODEL, scheduler, device="cpu")
    given = settings(nnodes=2)
    ours = terms_of(given, config, DEMO_MODEL, Role.DECODE)

    def differing(changed: EngineConfig, **more: Any) -> set[str]:
        theirs = terms_of(replace(given, **more), changed, DEMO_MODEL, Role.DECODE)
        return {name for name in ours if ours[name] != theirs[name]}

    assert differing(replace(config, dtype="bfloat16")) == {"dtype"}
    more = replace(scheduler, max_batch_size=8)
    assert differing(replace(config, scheduler=more)) == {"max_batch_size"}
    assert differing(config, pipeline_parallel=2) == {"pipeline_parallel"}
    assert differing(replace(config, memory_fraction=0.2, num_blocks=7)) == set()
    assert "the model's fingerprint" in ours
