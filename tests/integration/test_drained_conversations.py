"""Conversations whose worker drains: others take their cached blocks over, and the next turn
computes only what is new."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from cli.child import baton_command, baton_environment
from cli.fleet import Fleet
from tests.effort import some
from tests.integration.fleets import (
    all_counters,
    complete,
    counters,
    running_fleet,
    trace_of,
    wait_for,
    workers,
)
from tests.integration.reference import BLOCK, Reference

ANSWER, NEW = 40, 50
NUM_CONVERSATIONS = 3


SPLIT = {"decode_tensor_parallel": 2, "decode_pipeline_parallel": 2}


@pytest.fixture(params=some([("shm", {}), ("nixl", SPLIT), ("nixl", {})], 1), ids=str)
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """Prompts are computed where they run. A lease is renewed every second, and with it
    `baton drain` is seen."""
    transport, split = request.param
    settings = {"transport": transport, "prefill": 0, "decode": 2, **split}
    with running_fleet({"BATON_LEASE_S": "3"}, **settings) as fleet:
        yield fleet


@pytest.mark.parametrize("how", some(["SIGTERM", "baton drain"], 1))
def test_the_next_turn_after_a_drain_computes_only_what_is_new(
    fleet: Fleet, references: list[Reference], how: str
) -> None:
    prompts = [list(each.prompt) for each in references if 1000 <= len(each.prompt) <= 1100]
    turns, homes = [], []
    for prompt in prompts[:NUM_CONVERSATIONS]:
        answer = complete(fleet, prompt, max_tokens=ANSWER)
        turns.append(prompt + answer["choices"][0]["token_ids"] + prompt[:NEW])
        homes.append(trace_of(fleet, answer["id"])["attempts"][-1]["decode"]["worker_id"])
    drained = homes[0]
    (other,) = {"decode-1", "decode-2"} - {drained}
    before = counters(fleet, other)["prefill_tokens"]
    _drain(fleet, drained, how)
    taken = counters(fleet, other)["taken_blocks"]
    moved = [turn for turn, home in zip(turns, homes, strict=True) if home == drained]
    assert taken >= sum((len(turn) - NEW) // BLOCK for turn in moved)
    for turn in turns:
        cached = complete(fleet, turn, max_tokens=1)["usage"]["prompt_tokens_details"]
        assert cached["cached_tokens"] >= len(turn) - NEW - BLOCK
    computed = all_counters(fleet)[other]["prefill_tokens"] - before
    assert computed <= len(turns) * (NEW + BLOCK)
    fleet.processes[drained].start()
    _wait_back(fleet, drained)


@pytest.mark.nightly
@pytest.mark.parametrize("transport", ["shm", "nixl"])
@pytest.mark.parametrize(
    "split",
    [
        {"decode_tensor_parallel": 2},
        {"prefill_tensor_parallel": 2},
        {"prefill_pipeline_parallel": 2, "decode_tensor_parallel": 2},
    ],
    ids=str,
)
def test_workers_of_other_ranks_take_a_cache_over(
    references: list[Reference], transport: str, split: dict[str, int]
) -> None:
    """The only decode worker drains, so a prefill worker takes its cache, the answer's blocks
    included."""
    prompt = next(list(each.prompt) for each in references if 1000 <= len(each.prompt) <= 1100)
    settings = {"transport": transport, "prefill": 1, "decode": 1, "kv_checksum": True, **split}
    with running_fleet({"BATON_LEASE_S": "3"}, **settings) as fleet:
        answer = complete(fleet, prompt, max_tokens=ANSWER)
        turn = prompt + answer["choices"][0]["token_ids"] + prompt[:NEW]
        expected = complete(fleet, turn, max_tokens=ANSWER)["choices"][0]["token_ids"]
        _drain(fleet, "decode-1", "SIGTERM")
        assert counters(fleet, "prefill-1")["taken_blocks"] > 0
        fleet.processes["decode-1"].start()
        _wait_back(fleet, "decode-1")
        again = complete(fleet, turn, max_tokens=ANSWER)
        assert again["choices"][0]["token_ids"] == expected
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(turn) - BLOCK


def _drain(fleet: Fleet, name: str, how: str) -> None:
    child = fleet.processes[name]
    if how == "SIGTERM":
        child.signal(signal.SIGTERM)
    else:
        command = baton_command("drain", name, f"--redis-url={fleet.redis_url}")
        subprocess.run(command, env=baton_environment(os.environ), check=True, timeout=60)
    assert child.wait(60)
    assert child.exit_status() == 0
    wait_for("the worker to leave", lambda: name not in workers(fleet))


def _wait_back(fleet: Fleet, name: str) -> None:
    """Wait until the router is connected to a restarted worker. This may take long, because ranks
    that are not forked import torch."""
    wait_for(f"{name} to come back", lambda: workers(fleet).get(name, {}).get("connected"), 120)
