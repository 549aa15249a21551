"""A worker whose ranks lie on two hosts loses one of them while it loads, or while it drains: its
processes end by themselves, and requests go on elsewhere with the tokens of one rank.

The hosts are network namespaces. Heads run on the first one, as do workers of one rank.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from bench.tools.fleet import BenchFleet
from bench.tools.two_hosts import TwoHosts
from tests.faults.test_host_death_in_transfer import (
    NUM_TOKENS,
    config_of,
    faulty_fleet,
    found_by,
    one_engine,
    prompt_of,
)
from tests.integration.distant_hosts import two_hosts
from tests.integration.fleets import wait_for
from tests.integration.test_exchange_between_hosts import flags_of
from tests.integration.test_ranks_on_hosts import END_S, complete, left_after, ranks_of

MANY_TOKENS, EARLY = 300, 20
HEAD, NODE = "decode-1", "node-decode"
LAYOUT = (2, 1)


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as both:
        yield both


STARTS = {
    "the head is killed": "the head at .* has closed the connection",
    "the other host's process is killed": "the worker ends: node 1 .* has closed the connection",
    "the other host's process stands still": "the worker ends: node 1 .* has said nothing for",
    "the other rank is killed": "rank 1 has ended by signal 9",
    "the other rank stands still, and its host is told to stop": "stopped while it started",
}


@pytest.mark.nightly
@pytest.mark.parametrize("fault", STARTS)
def test_a_worker_that_loses_a_host_while_it_loads(
    hosts: TwoHosts, tmp_path: Path, fault: str
) -> None:
    found = found_by(lose_host_in_start, hosts, tmp_path, [fault])
    assert found["ranks_left"] == []
    assert any(re.search(STARTS[fault], each) for each in found["logs"]), found["logs"]
    assert found["answer"] == one_engine([prompt_of(0)], NUM_TOKENS)[0]


def lose_host_in_start(argv: list[str]) -> int:
    """Print what a worker that has started again says when its other rank, which stands still, and
    the worker's hosts suffer this; and the tokens after a prompt when it runs again."""
    other, folder, fault = argv
    flags = {"decode": flags_of("decode", *LAYOUT)}
    config = config_of(flags, other, num_prefill=0, num_decode=1)
    with faulty_fleet(config, folder) as (fleet, _):
        model = fleet.workers("router-1")[HEAD]["model"]
        fleet.signal(HEAD, signal.SIGKILL)
        for name in (HEAD, NODE):
            fleet.wait_end(name, END_S)
            fleet.start(name)
        hand = begun_hand(fleet)
        hand.suspend()
        wait_for("the other host to join", lambda: log_of(fleet, NODE).count("joined the w") == 2)
        ranks = ranks_of(fleet, [HEAD, NODE])
        match fault:
            case "the head is killed":
                fleet.signal(HEAD, signal.SIGKILL)
            case "the other host's process is killed":
                fleet.signal(NODE, signal.SIGKILL)
            case "the other host's process stands still":
                fleet.signal(NODE, signal.SIGSTOP)
                fleet.wait_end(HEAD, END_S)
                fleet.signal(NODE, signal.SIGCONT)
            case "the other rank is killed":
                hand.kill()
            case _:
                fleet.signal(NODE, signal.SIGTERM)
        ranks_left = left_after(END_S, ranks)
        logs = [log_of(fleet, name) for name in (HEAD, NODE)]
        for name in (HEAD, NODE):
            fleet.start(name)
        fleet.wait_ready()
        answer = complete(fleet, model, prompt_of(0), NUM_TOKENS)
    print(json.dumps({"ranks_left": ranks_left, "logs": logs, "answer": answer}))
    return 0


def begun_hand(fleet: BenchFleet) -> psutil.Process:
    """The rank on the other host, which has begun."""
    node = psutil.Process(fleet.pids[NODE])
    (hand,) = wait_for("a rank to begin", node.children)
    return hand


def log_of(fleet: BenchFleet, name: str) -> str:
    return (fleet._processes.folder / f"{name}.log").read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_worker_that_loses_a_host_while_it_drains(
    hosts: TwoHosts, tmp_path: Path, how: str
) -> None:
    """Both hosts are told to stop, the other one first."""
    found = found_by(lose_host_in_drain, hosts, tmp_path, [how])
    assert found["answer"] == one_engine([prompt_of(0)], MANY_TOKENS)[0]
    assert found["ranks_left"] == []
    assert found["work_left"] == 0


def lose_host_in_drain(argv: list[str]) -> int:
    """Print the tokens after a prompt whose worker is about to hand it over when its other host is
    lost, and what is left."""
    other, folder, how = argv
    flags = {"decode": flags_of("decode", *LAYOUT)}
    config = config_of(flags, other, num_prefill=0, num_decode=2)
    with faulty_fleet(config, folder) as (fleet, points), ThreadPoolExecutor(1) as threads:
        model = fleet.workers("router-1")["decode-2"]["model"]
        fleet.signal("decode-2", signal.SIGSTOP)
        wait_for("decode-2 to be silent", lambda: condition(fleet, "decode-2") == "silent")
        points.arm([HEAD], "decode", EARLY)
        asked = threads.submit(complete, fleet, model, prompt_of(0), MANY_TOKENS)
        points.held("decode")
        fleet.signal("decode-2", signal.SIGCONT)
        wait_for("decode-2 to be usable", lambda: condition(fleet, "decode-2") == "usable")
        ranks = ranks_of(fleet, [HEAD, NODE])
        points.arm([HEAD], "post")
        fleet.signal(NODE, signal.SIGTERM)
        wait_for("the head to hear", lambda: "was told to stop" in log_of(fleet, HEAD))
        fleet.signal(HEAD, signal.SIGTERM)
        points.release(HEAD, "decode")
        points.held("post")
        fleet.signal(NODE, signal.Signals[how])
        points.release(HEAD, "post")
        answer = asked.result(END_S)
        fleet.wait_end(HEAD, END_S)
        fleet.signal(NODE, signal.SIGCONT)
        found = {
            "answer": answer,
            "ranks_left": left_after(END_S, ranks),
            "work_left": fleet.left_over(),
        }
    print(json.dumps(found))
    return 0


def condition(fleet: BenchFleet, name: str) -> str:
    """The state of a worker as the router sees it."""
    shown = fleet.workers("router-1").get(name)
    return "" if shown is None else str(shown["condition"]["state"])
