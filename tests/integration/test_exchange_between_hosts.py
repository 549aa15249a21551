"""Workers whose ranks lie on two hosts hand KV blocks to others, and get them: answers are those of
one rank, also for a request whose prefill worker loses a hand on the way.

The hosts are network namespaces. Heads and workers of one rank run on the first.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from bench.tools.fleet import BenchFleet, FleetConfig
from bench.tools.two_hosts import ADDRESSES, INTERFACE, TwoHosts
from tests.integration.distant_hosts import forked_on_host, node_in, two_hosts
from tests.integration.one_engine import tokens_of_one_engine
from tests.integration.reference import BLOCK
from tests.integration.test_ranks_on_hosts import (
    END_S,
    ENGINE,
    NUM_TOKENS,
    PROMPTS,
    complete,
)
from tests.paths import DEMO_MODEL

ONE = (1, 1)
LAYOUTS = [
    ((2, 1), (1, 2)),
    ((2, 1), ONE),
    ((1, 2), ONE),
    (ONE, (2, 1)),
    (ONE, (1, 2)),
    ((2, 2), (2, 1)),
]
LONG = [3 + i * 7 % 900 for i in range(1800)]
NUM_SENT = sum(-(-len(prompt) // BLOCK) for prompt in PROMPTS)
NETWORK = (
    f"--kv-interface={INTERFACE}",
    "--allow-kv-over-tcp=on",
    "--peer-silence-s=10",  # a full machine loads slowly
    "--stats-interval-ms=20",
)
PORTS = {"prefill": 29501, "decode": 29502}


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as both:
        yield both


@pytest.mark.nightly
@pytest.mark.parametrize(("prefill", "decode"), LAYOUTS)
def test_blocks_move_between_workers_of_several_hosts(
    hosts: TwoHosts, prefill: tuple[int, int], decode: tuple[int, int]
) -> None:
    arguments = [*hosts.namespaces, *map(str, (*prefill, *decode))]
    found = json.loads(forked_on_host(hosts, arguments, main).splitlines()[-1])
    prompts = [*PROMPTS, LONG]
    expected = tokens_of_one_engine(
        DEMO_MODEL, prompts, NUM_TOKENS, dtype="float32", num_blocks=128
    )
    assert found["answers"] == expected
    assert found["received"] == found["sent"] == NUM_SENT
    assert found["was_lost_on_the_way"]
    if prefill != ONE:
        assert "prefill-1 is gone: it is silent and its lease has ended" in found["log"], (
            "its other host may have written until then"
        )


def main(argv: list[str]) -> int:
    """Print the tokens after each prompt, and how many blocks have moved for all but the last,
    whose prefill worker loses a rank."""
    _, other, *sizes = argv
    layouts = {"prefill": sizes[:2], "decode": sizes[2:]}
    flags = {role: flags_of(role, *map(int, layout)) for role, layout in layouts.items()}
    flags["prefill"] += ("--chunk-max-tokens=32",)
    config = FleetConfig(
        str(DEMO_MODEL),
        worker_flags=(*ENGINE, *NETWORK, "--num-blocks=512"),  # some stay fenced for a while
        role_flags={role: (*each, f"--host={ADDRESSES[0]}") for role, each in flags.items()},
        router_flags=("--local-prefill-threshold-tokens=0",),
        store_host=ADDRESSES[0],
        other_nodes={
            f"node-{role}": node_in(other, role, each)
            for role, each in flags.items()
            if "--nnodes=2" in each
        },
    )
    with BenchFleet(config) as fleet:
        model = fleet.workers("router-1")["decode-1"]["model"]
        url = fleet.url("router-1")
        answers = [complete(fleet, model, prompt) for prompt in PROMPTS]
        sent = count_of(url, "prefill-1", "blocks_sent", lambda found: found >= NUM_SENT)
        received = count_of(url, "decode-1", "blocks_received", lambda found: found >= sent)
        answer, was_lost_on_the_way = complete_while_a_rank_dies(fleet, url, model, sent)
        count_of(url, "decode-1", "blocks_stuck", lambda found: found == 0)
        log = (fleet._processes.folder / "decode-1.log").open()  # read when all is said
    found = {
        "answers": [*answers, answer],
        "sent": sent,
        "received": received,
        "was_lost_on_the_way": was_lost_on_the_way,
        "log": log.read(),
    }
    print(json.dumps(found))
    return 0


def count_of(url: str, worker: str, name: str, is_final: Callable[[int], bool]) -> int:
    """What a worker reports, once that is final."""
    deadline = time.monotonic() + END_S
    while not is_final(found := reported(url, worker, name)):
        assert time.monotonic() < deadline, f"{worker} reports {found} {name}"
    return found


def reported(url: str, worker: str, name: str) -> int:
    with urllib.request.urlopen(f"{url}/fleet", timeout=END_S) as answer:
        workers = {each["worker_id"]: each for each in json.load(answer)["workers"]}
    # a worker whose first report has not come has no counters
    return int({**workers[worker], **workers[worker]["counters"]}.get(name, 0))


def complete_while_a_rank_dies(
    fleet: BenchFleet, url: str, model: str, sent: int
) -> tuple[list[int], bool]:
    """The tokens after the long prompt, and whether a rank of its prefill worker was killed between
    the first block and the answer."""
    process = psutil.Process(fleet.pids.get("node-prefill", fleet.pids["prefill-1"]))
    rank = next(iter(process.children()), process)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(complete, fleet, model, LONG)
        while not answer.done():
            if reported(url, "prefill-1", "blocks_sent") > sent:
                rank.kill()
                break
        was_under_way = not answer.done()
        return answer.result(), was_under_way


def flags_of(role: str, tp_size: int, num_stages: int) -> tuple[str, ...]:
    if (tp_size, num_stages) == ONE:
        return ()
    return (
        "--nnodes=2",
        f"--master-addr={ADDRESSES[0]}",
        f"--master-port={PORTS[role]}",
        f"--tensor-parallel={tp_size}",
        f"--pipeline-parallel={num_stages}",
    )
