"""Turns of conversations on a fleet that fetches: placed by load alone, each worker that lacks the
history fetches it, and the output is that of a single worker, token for token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cli.fleet import Fleet
from tests.effort import some
from tests.integration.fleets import all_counters, complete, running_fleet
from tests.integration.reference import BLOCK, Reference

TURNS, ANSWER, NEW = 4, 40, 100
ALONE: dict[int, list[list[int]]] = {}


@pytest.fixture(scope="module", params=some(["nixl", "shm"], 2))
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    settings = {"transport": request.param, "kv_checksum": True}
    with running_fleet({"BATON_PLACEMENT": "load"}, prefill=2, decode=1, **settings) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def long_prompts(references: list[Reference]) -> list[list[int]]:
    return [list(each.prompt) for each in references if 1000 <= len(each.prompt) <= 1100][:2]


def converse(fleet: Fleet, prompt: list[int]) -> list[tuple[list[int], int, int]]:
    """Each turn's answer, its prompt's length, and how much of it was cached."""
    turns = []
    for turn in range(TURNS):
        answer = complete(fleet, prompt, max_tokens=ANSWER)
        tokens = answer["choices"][0]["token_ids"]
        details = answer["usage"]["prompt_tokens_details"]
        turns.append((tokens, len(prompt), details["cached_tokens"]))
        prompt = prompt + tokens + prompt[turn : turn + NEW]
    return turns


def test_turns_compute_only_what_is_new(fleet: Fleet, long_prompts: list[list[int]]) -> None:
    before = all_counters(fleet)
    spoken = [converse(fleet, prompt) for prompt in long_prompts]
    after = all_counters(fleet)
    grown = {
        name: sum(after[each][name] - before[each][name] for each in after)
        for name in ("prefill_tokens", "fetched_tokens", "served_blocks", "frames_refused")
    }
    lengths = [length for turns in spoken for _, length, _ in turns]
    cached = [number for turns in spoken for _, _, number in turns]
    assert grown["prefill_tokens"] == sum(lengths) - sum(cached), "fetched tokens count as cached"
    assert grown["fetched_tokens"] == grown["served_blocks"] * BLOCK > 0
    assert grown["frames_refused"] == 0
    if not ALONE:
        with running_fleet(prefill=0, decode=1) as alone:
            ALONE.update(enumerate([t for t, _, _ in converse(alone, p)] for p in long_prompts))
    assert [[tokens for tokens, _, _ in turns] for turns in spoken] == list(ALONE.values())
