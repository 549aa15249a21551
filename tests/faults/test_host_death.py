"""A worker whose ranks lie on two hosts loses the head or the other host in the middle of requests:
they go on elsewhere, with the tokens of one rank, and no block stays behind.

The hosts are network namespaces. Heads run on the first, as do workers of one rank.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest

from bench.tools.fleet import BenchFleet, FleetConfig
from bench.tools.two_hosts import ADDRESSES, TwoHosts
from tests.effort import NIGHTLY
from tests.integration.distant_hosts import forked_on_host, node_in, two_hosts
from tests.integration.one_engine import tokens_of_one_engine
from tests.integration.test_exchange_between_hosts import NETWORK, count_of, flags_of, reported
from tests.integration.test_ranks_on_hosts import END_S, ENGINE, complete, left_after, ranks_of
from tests.paths import DEMO_MODEL

CHUNK_TOKENS = 32
EARLY = 20
LAYOUTS = {"prefill": (2, 1), "decode": (1, 2)}
EVERYDAY = ["decode-1"]
ALL = [*EVERYDAY, "node-decode", "prefill-1", "node-prefill"]
"""Who is killed: heads and other hosts' processes."""


class Load(NamedTuple):
    """Requests at once, and the counter that shows that a worker is in the middle of them when it
    reaches EARLY."""

    prompts: list[list[int]]
    num_tokens: int
    progress: str


LOADS = {
    "decode": Load(
        [[3 + (7 * number + place) % 900 for place in range(40)] for number in range(2)],
        150,
        "decode_tokens",
    ),
    "prefill": Load(
        [[3 + (number + place) * 7 % 900 for place in range(1500)] for number in range(2)],
        8,
        "blocks_sent",
    ),
}


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as both:
        yield both


@pytest.mark.parametrize("victim", ALL if NIGHTLY else EVERYDAY)
def test_requests_of_a_worker_that_loses_a_host_go_on_elsewhere(
    hosts: TwoHosts, victim: str
) -> None:
    found = json.loads(forked_on_host(hosts, [*hosts.namespaces, victim], main).splitlines()[-1])
    load = LOADS[role_of(victim)]
    assert found["answers"] == tokens_of_one_engine(
        DEMO_MODEL, load.prompts, load.num_tokens, dtype="float32", num_blocks=256
    )
    assert found["were_under_way"]
    assert found["ranks_left"] == []
    assert found["work_left"] == 0


def role_of(victim: str) -> str:
    return "decode" if "decode" in victim else "prefill"


def main(argv: list[str]) -> int:
    """Print the tokens after each prompt, whether requests were on the victim's worker when it was
    killed, which of its ranks stay, and what is under way at the end."""
    _, other, victim = argv
    role = role_of(victim)
    load, worker, left = LOADS[role], f"{role}-1", "decode-2" if role == "decode" else "decode-1"
    with BenchFleet(config_of(role, other)) as fleet:
        model, url = fleet.workers("router-1")["decode-1"]["model"], fleet.url("router-1")
        ranks = ranks_of(fleet, [worker, f"node-{role}"])
        with ThreadPoolExecutor(len(load.prompts)) as threads:
            answers = [
                threads.submit(complete, fleet, model, prompt, load.num_tokens)
                for prompt in load.prompts
            ]
            count_of(url, worker, load.progress, lambda found: found >= EARLY)
            were_under_way = reported(url, worker, "num_running") > 0
            os.kill(fleet.pids[victim], signal.SIGKILL)
            tokens = [each.result() for each in answers]
        ranks_left = left_after(END_S, ranks)
        count_of(url, left, "blocks_stuck", lambda found: found == 0)
        found = {
            "answers": tokens,
            "were_under_way": were_under_way,
            "ranks_left": ranks_left,
            "work_left": fleet.left_over(),
        }
    print(json.dumps(found))
    return 0


def config_of(role: str, other: str) -> FleetConfig:
    """Two decode workers, the first of which spans the hosts; or a prefill and a decode worker that
    both do."""
    roles = ["decode"] if role == "decode" else ["prefill", "decode"]
    flags = {each: flags_of(each, *LAYOUTS[each]) for each in roles}
    here = (f"--host={ADDRESSES[0]}", f"--chunk-max-tokens={CHUNK_TOKENS}", "--num-blocks=512")
    return FleetConfig(
        str(DEMO_MODEL),
        num_prefill=len(roles) - 1,
        num_decode=3 - len(roles),
        worker_flags=(*ENGINE, *NETWORK, *here),
        role_flags={f"{each}-1": flags[each] for each in roles},
        router_flags=("--placement=load", "--local-prefill-threshold-tokens=512"),
        store_host=ADDRESSES[0],
        other_nodes={f"node-{each}": node_in(other, each, flags[each]) for each in roles},
    )
