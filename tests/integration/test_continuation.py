"""The next turn of a chat stays where its prefix is: no block moves, only the suffix runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cli.fleet import Fleet
from tests.http_client import HTTP
from tests.integration.fleets import all_counters, complete, running_fleet, trace_of
from tests.integration.reference import BLOCK, DEMO_MODEL, Reference

SYSTEM = (
    "You explain the Python language to people who write it every day. Be brief and exact, quote "
    "the documentation where it helps, and say so when you do not know something at all. " * 2
)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with running_fleet() as fleet:
        yield fleet


def deltas(fleet: Fleet, before: dict[str, dict[str, int]]) -> dict[str, int]:
    """How much each counter has grown, over both workers."""
    grown: dict[str, int] = {}
    for name, now in all_counters(fleet).items():
        for counter, value in now.items():
            grown[counter] = grown.get(counter, 0) + value - before[name].get(counter, 0)
    return grown


def test_the_second_turn_moves_nothing_and_computes_only_its_suffix(
    fleet: Fleet, references: list[Reference]
) -> None:
    first = list(next(r.prompt for r in references if len(r.prompt) == 300))
    output = complete(fleet, first, max_tokens=40)["choices"][0]["token_ids"]
    before = all_counters(fleet)
    assert before["decode-1"]["blocks_received"] > 0, "the first turn came from the prefill worker"
    suffix = first[5:30]
    answer = complete(fleet, [*first, *output, *suffix], max_tokens=10)
    grown = deltas(fleet, before)
    assert grown["blocks_sent"] == grown["blocks_received"] == grown["handoffs"] == 0
    # The last token of the first turn was never an input, so its block is not complete.
    held = (len(first) + len(output) - 1) // BLOCK * BLOCK
    assert grown["prefill_tokens"] == len(first) + len(output) + len(suffix) - held
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == held
    assert trace_of(fleet, answer["id"])["placement"]["mode"] == "local"


def test_the_usage_of_a_turn_that_a_prefill_worker_computes_adds_up(
    fleet: Fleet, references: list[Reference]
) -> None:
    """The decode worker has the answer's blocks; the prefill worker fetches or computes them."""
    first = list(next(r.prompt for r in references if len(r.prompt) == 300))[::-1]
    output = complete(fleet, first, max_tokens=40)["choices"][0]["token_ids"]
    before, counted = all_counters(fleet), metric(fleet, "baton_cached_prompt_tokens_total")
    answer = complete(fleet, [*first, *output, *first * 4], max_tokens=4)
    computed = deltas(fleet, before)["prefill_tokens"]
    usage, trace = answer["usage"], trace_of(fleet, answer["id"])
    assert trace["placement"]["mode"] == "remote"
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert usage["prompt_tokens"] - computed == cached == trace["num_cached_tokens"] > 0
    assert trace["attempts"][0]["decode"]["cached_tokens"] >= cached
    assert sum(each["num_tokens"] for each in trace["prompt_sources"]) == usage["prompt_tokens"]
    assert metric(fleet, "baton_cached_prompt_tokens_total") - counted == cached


def metric(fleet: Fleet, name: str) -> float:
    page = HTTP.get(f"{fleet.url}/metrics").raise_for_status().text
    return float(next(line for line in page.splitlines() if line.startswith(name)).split()[1])


def test_a_chat_goes_on_where_it_was(fleet: Fleet) -> None:
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Explain the `with` statement."},
    ]
    first = chat(fleet, messages)
    assert trace_of(fleet, first["id"])["placement"]["mode"] == "remote"
    before = all_counters(fleet)
    messages += [first["choices"][0]["message"], {"role": "user", "content": "Tell me more."}]
    for message in messages:
        message.pop("refusal", None)
    second = chat(fleet, messages)
    trace = trace_of(fleet, second["id"])
    assert trace["placement"]["mode"] == "local"
    grown = deltas(fleet, before)
    assert grown["blocks_sent"] == 0
    num_prompt = second["usage"]["prompt_tokens"]
    assert grown["prefill_tokens"] == num_prompt - grown["cached_tokens"] <= 64


def chat(fleet: Fleet, messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"model": DEMO_MODEL.name, "messages": messages, "temperature": 0, "max_tokens": 60}
    answer = HTTP.post(f"{fleet.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()
