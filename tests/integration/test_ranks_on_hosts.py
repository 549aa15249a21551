"""A worker whose ranks lie on two hosts answers what one rank answers, and lives and dies as one.

The hosts are network namespaces. The worker's head runs on the first, its other node on the second;
it prefills for itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator

import psutil
import pytest

from bench.tools.fleet import BenchFleet, FleetConfig
from bench.tools.two_hosts import ADDRESSES, INTERFACE, TwoHosts
from tests.effort import NIGHTLY
from tests.integration.distant_hosts import forked_on_host, node_in, two_hosts
from tests.integration.one_engine import tokens_of_one_engine
from tests.paths import DEMO_MODEL

END_S = 120.0
SILENCE_S = 4
NUM_TOKENS = 24
PROMPTS = [list(range(40, 77)), list(range(100, 340))]
ENGINE = ("--dtype=float32", "--device=cpu", "--torch-threads=1", "--num-blocks=128")
SPAN = (
    "--nnodes=2",
    f"--master-addr={ADDRESSES[0]}",
    f"--kv-interface={INTERFACE}",
    "--allow-kv-over-tcp=on",
    f"--peer-silence-s={SILENCE_S}",
)
FAULTS = {
    "killed": r"rank \d has ended by signal 9",
    "stopped": f"rank {{rank}} on node 1 has not answered for {3 * SILENCE_S} s",
    "cut off": rf"node 1 \({ADDRESSES[1]}\) has said nothing for {SILENCE_S} s",
    "node killed": rf"node 1 \({ADDRESSES[1]}\) has closed the connection",
    "node told to stop": "stopped with the worker",
    "head killed": "the head at .* has closed the connection",
}
EVERYDAY = [((2, 1), "killed")]
ALL = [(layout, fault) for layout in [(2, 1), (1, 2), (2, 2)] for fault in FAULTS]


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as both:
        yield both


@pytest.mark.parametrize(("layout", "fault"), ALL if NIGHTLY else EVERYDAY)
def test_ranks_on_two_hosts_answer_as_one_and_end_together(
    hosts: TwoHosts, layout: tuple[int, int], fault: str
) -> None:
    printed = forked_on_host(hosts, [*hosts.namespaces, *map(str, layout), fault], main)
    found = json.loads(printed.splitlines()[-1])
    expected = tokens_of_one_engine(DEMO_MODEL, PROMPTS, NUM_TOKENS, dtype="float32")
    assert found["answers"] == expected
    rank = layout[0] * layout[1] // 2
    assert re.search(FAULTS[fault].format(rank=rank), found["log"]), found["log"]
    assert found["left"] == []


def main(argv: list[str]) -> int:
    """Print the tokens after each prompt, then what the worker says when a fault comes to the first
    hand of its other node, and which processes stay."""
    _, other, tp_size, num_stages, fault = argv
    span = (*SPAN, f"--tensor-parallel={tp_size}", f"--pipeline-parallel={num_stages}")
    head = (*span, "--node-rank=0", f"--host={ADDRESSES[0]}")
    config = FleetConfig(
        str(DEMO_MODEL),
        num_prefill=0,
        worker_flags=ENGINE,
        role_flags={"decode": head},
        store_host=ADDRESSES[0],
        other_nodes={"node-1": node_in(other, "decode", span)},
    )
    with BenchFleet(config) as fleet:
        name = fleet.workers("router-1")["decode-1"]["model"]
        answers = [complete(fleet, name, prompt) for prompt in PROMPTS]
        log, left = break_down(fleet, name, other, fault)
    print(json.dumps({"answers": answers, "log": log, "left": left}))
    return 0


def complete(
    fleet: BenchFleet, model: str, prompt: list[int], num_tokens: int = NUM_TOKENS
) -> list[int]:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    head = {"Content-Type": "application/json"}
    url = f"{fleet.url('router-1')}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=END_S) as answer:
        tokens: list[int] = json.load(answer)["choices"][0]["token_ids"]
    return tokens


def break_down(fleet: BenchFleet, model: str, other: str, fault: str) -> tuple[str, list[str]]:
    """What both nodes have logged, and the processes that are left, after a fault."""
    names = ["decode-1", "node-1"]
    running = ranks_of(fleet, names)
    head, node = (psutil.Process(fleet.pids[each]) for each in names)
    hand = node.children()[0]
    match fault:
        case "cut off":
            command = ["ip", "-n", other, "link", "set", INTERFACE, "down"]
            subprocess.run(command, check=True)
        case "killed":
            hand.kill()
        case "stopped":
            hand.send_signal(signal.SIGSTOP)
            with contextlib.suppress(OSError):
                complete(fleet, model, PROMPTS[0])
        case "node killed":
            node.kill()
        case "node told to stop":
            node.terminate()
        case "head killed":
            head.kill()
    left = left_after(END_S, running)
    logs = [fleet._processes.folder / f"{each}.log" for each in names]
    return "".join(each.read_text() for each in logs), left


def ranks_of(fleet: BenchFleet, names: list[str]) -> dict[int, str]:
    """These processes and their children, by new pidfds, for `left_after`."""
    nodes = [psutil.Process(fleet.pids[each]) for each in names]
    ranks = [each for node in nodes for each in (node, *node.children())]
    return {os.pidfd_open(each.pid): str(each) for each in ranks}


def left_after(limit_s: float, running: dict[int, str]) -> list[str]:
    """The names of the processes, by their pidfds, that do not end in time."""
    poller, deadline = select.poll(), time.monotonic() + limit_s
    for pidfd in running:
        poller.register(pidfd, select.POLLIN)
    while running and (left_s := deadline - time.monotonic()) > 0:
        for pidfd, _ in poller.poll(left_s * 1e3):
            poller.unregister(pidfd)
            del running[pidfd]
            os.close(pidfd)
    return list(running.values())
