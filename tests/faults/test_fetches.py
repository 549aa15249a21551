"""Holders that die or stand still in the middle of a fetch: the request ends with the right tokens,
and every block comes back."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from protocol.messages import Role
from tests.effort import some
from tests.faults.faulty_fleet import TRIES, FaultyFleet, Stream, faulty_fleet, fetch_held_at
from tests.integration.fleets import all_counters, complete, workers
from tests.integration.reference import NUM_TOKENS, Reference

LOAD = {"BATON_PLACEMENT": "load"}
Counters = dict[str, dict[str, int]]


@pytest.fixture(scope="module", params=some(["nixl", "shm"], 1))
def fleet(request: pytest.FixtureRequest) -> Iterator[FaultyFleet]:
    with faulty_fleet(LOAD, prefill=2, decode=2, transport=request.param) as fleet:
        yield fleet


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_holder_that_ends_or_stops_in_mid_fetch(
    fleet: FaultyFleet, long_prompts: list[Reference], how: signal.Signals
) -> None:
    fleet.revive()
    reference = long_prompts[-1 if how is signal.SIGKILL else -3]  # not cached by the other test
    stream, holder = fetch_held_at(fleet, "serve", list(reference.prompt), NUM_TOKENS)
    if how is signal.SIGKILL:
        fleet.kill(holder)
    else:
        fleet.signal(holder, how)
    stream.wait()
    assert (stream.error, stream.tokens) == (None, list(reference.output))
    fleet.revive()
    counted = all_counters(fleet.fleet)
    assert all(each["blocks_used"] == 0 for each in workers(fleet.fleet).values())
    assert sum(each["fetches"] for each in counted.values()) >= 1


def test_a_holder_that_evicts_in_mid_fetch(
    fleet: FaultyFleet, long_prompts: list[Reference]
) -> None:
    """What it has pinned arrives, and the rest is computed."""
    fleet.revive()
    reference = long_prompts[-2]
    complete(fleet.fleet, list(reference.prompt), max_tokens=1)
    before = all_counters(fleet.fleet)
    for role in (Role.PREFILL, Role.DECODE):
        fleet.spoil(role, "evict")
    for _ in range(TRIES):
        stream = Stream(fleet.url, list(reference.prompt), NUM_TOKENS).wait()
        assert (stream.error, stream.tokens) == (None, list(reference.output))
        after = all_counters(fleet.fleet)
        if grown(before, after, "fetch_missing_blocks"):
            assert grown(before, after, "fetched_tokens") > 0
            return
    raise AssertionError("nobody fetched")


def grown(before: Counters, after: Counters, name: str) -> int:
    return sum(after[each][name] - before[each][name] for each in after)
