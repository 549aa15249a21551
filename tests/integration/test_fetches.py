"""Turns of conversations on a fleet that fetches: sent to each worker in turn, each one that lacks
the history fetches it, and the output is that of a single worker, token for token."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

import pytest

from cli.fleet import Fleet
from tests.effort import some, times
from tests.integration.fleets import all_counters, complete, running_fleet, trace_of
from tests.integration.one_engine import tokens_of_one_engine
from tests.integration.reference import BLOCK, DEMO_MODEL, Reference

TURNS, ANSWER, NEW = times(3, 4), 20, 100
NUM_PROMPTS = times(1, 2)


SPLITS: list[dict[str, int]] = [
    {},
    {"prefill_tensor_parallel": 2},
    {"decode_tensor_parallel": 2},
    {"prefill_pipeline_parallel": 2, "decode_tensor_parallel": 2},
]
FLEETS = list(itertools.product(["shm", "nixl"], SPLITS))


@pytest.fixture(scope="module", params=some(FLEETS, 1), ids=str)
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """Workers of any ranks fetch from each other."""
    transport, split = request.param
    settings = {"transport": transport, "kv_checksum": True, "dtype": "float32", **split}
    with running_fleet({"BATON_PLACEMENT": "load"}, prefill=2, decode=1, **settings) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def long_prompts(references: list[Reference]) -> list[list[int]]:
    return [list(each.prompt) for each in references if len(each.prompt) >= 500][:NUM_PROMPTS]


def session_of_each(fleet: Fleet) -> list[str]:
    """The names of two sessions, which ran on different prefill workers."""
    found: dict[str, str] = {}
    for number in count():
        name = f"session-{number}"
        answer = complete(fleet, [number + 3] * 40, max_tokens=2, session_id=name)
        attempt = trace_of(fleet, answer["id"])["attempts"][-1]
        found.setdefault(attempt["prefill"]["worker_id"], name)
        if len(found) == 2:
            break
    return list(found.values())


class Turn(NamedTuple):
    """A turn's prompt, its answer, and how much of the prompt was cached."""

    prompt: list[int]
    tokens: list[int]
    cached: int


def converse(fleet: Fleet, prompt: list[int], sessions: Sequence[str]) -> list[Turn]:
    """The turns name the sessions in turn, and so go where these ran."""
    turns = []
    for turn in range(TURNS):
        answer = complete(
            fleet, prompt, max_tokens=ANSWER, session_id=sessions[turn % len(sessions)]
        )
        tokens = answer["choices"][0]["token_ids"]
        details = answer["usage"]["prompt_tokens_details"]
        turns.append(Turn(prompt, tokens, details["cached_tokens"]))
        prompt = prompt + tokens + prompt[turn : turn + NEW]
    return turns


def test_turns_compute_only_what_is_new(fleet: Fleet, long_prompts: list[list[int]]) -> None:
    sessions = session_of_each(fleet)
    before = all_counters(fleet)
    turns = [turn for prompt in long_prompts for turn in converse(fleet, prompt, sessions)]
    after = all_counters(fleet)
    grown = {
        name: sum(after[each][name] - before[each][name] for each in after)
        for name in ("prefill_tokens", "fetched_tokens", "served_blocks", "frames_refused")
    }
    computed = sum(len(turn.prompt) - turn.cached for turn in turns)
    assert grown["prefill_tokens"] == computed, "fetched tokens count as cached"
    assert grown["fetched_tokens"] == grown["served_blocks"] * BLOCK > 0
    assert grown["frames_refused"] == 0
    prompts = [turn.prompt for turn in turns]
    alone = tokens_of_one_engine(DEMO_MODEL, prompts, ANSWER, num_blocks=256, dtype="float32")
    assert [turn.tokens for turn in turns] == alone
