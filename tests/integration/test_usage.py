"""Answers of every API give the number of cached tokens that workers, metrics and receipts give.

Pools are small, and host memory below them is not: turns find their KV in the worker's own cache,
in its tier, or on another worker.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from cli.fleet import Fleet
from tests.effort import some, times
from tests.http_client import HTTP
from tests.integration.fleets import all_counters, running_fleet, wait_for
from tests.integration.reference import DEMO_MODEL

POOL = times(80, 160)  # blocks: three prompts or so
HOST_BLOCKS, BLOCK_BYTES = 2000, 16 << 10
PATHS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
ANSWER = 16
TURNS = 3


class Usage(NamedTuple):
    """The tokens of a request's prompts, those of them that were cached, and those of outputs."""

    prompt: int
    cached: int
    output: int

    def __add__(self, other: tuple[int, ...]) -> Usage:  # type: ignore[override]
        return Usage(*(a + b for a, b in zip(self, other, strict=True)))


SPLIT = {"prefill_tensor_parallel": 2, "decode_pipeline_parallel": 2}


@pytest.fixture(
    scope="module", params=some([("load", {}), ("load", SPLIT), ("cache", {})], 1), ids=str
)
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """Workers of several ranks count as any others."""
    placement, split = request.param
    environment = {
        "BATON_PLACEMENT": placement,
        "BATON_HOST_TIER_BYTES": str(HOST_BLOCKS * BLOCK_BYTES),
    }
    sizes = {"prefill": 2, "decode": 1, "num_blocks": POOL}
    with running_fleet(environment, transport="shm", **sizes, **split) as made:
        yield made


def body_of(api: str, said: list[str], stream: bool, n: int) -> dict[str, Any]:
    """Said in turn by the user and the assistant."""
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)]
    body: dict[str, Any] = {"model": DEMO_MODEL.name, "temperature": 0, "stream": stream}
    limit = "max_output_tokens" if api == "responses" else "max_tokens"
    body |= {limit: ANSWER, "ignore_eos": True}
    if api == "completions":
        body["prompt"] = "\n".join(said)
    else:
        body["input" if api == "responses" else "messages"] = messages
    if api in ("completions", "chat"):
        body |= {"n": n} | ({"stream_options": {"include_usage": True}} if stream else {})
    return body


def told(api: str, answer: dict[str, Any]) -> tuple[str, Usage]:
    """The text of a whole answer's first choice, and its usage."""
    usage = answer["usage"]
    if api == "messages":
        cached = usage["cache_read_input_tokens"]
        text = "".join(each.get("text", "") for each in answer["content"])
        return text, Usage(usage["input_tokens"] + cached, cached, usage["output_tokens"])
    if api == "responses":
        cached = usage["input_tokens_details"]["cached_tokens"]
        parts = [part for item in answer["output"] for part in item.get("content", ())]
        text = "".join(part.get("text", "") for part in parts)
        return text, Usage(usage["input_tokens"], cached, usage["output_tokens"])
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    choice = answer["choices"][0]
    text = choice["text"] if api == "completions" else choice["message"]["content"]
    return text or "", Usage(usage["prompt_tokens"], cached, usage["completion_tokens"])


def told_by_events(api: str, events: list[dict[str, Any]]) -> Usage:
    """The usage at the end of a stream; where its beginning has one, too, they agree."""
    if api == "responses":
        return told(api, events[-1]["response"])[1]
    if api == "messages":
        first = next(each["message"] for each in events if each["type"] == "message_start")
        last = next(each["usage"] for each in events if each["type"] == "message_delta")
        begun, ended = (
            told(api, {"usage": each, "content": []})[1] for each in (first["usage"], last)
        )
        assert begun[:2] == ended[:2]
        return ended
    empty = {"text": "", "message": {"content": ""}}
    return told(api, {"usage": events[-1]["usage"], "choices": [empty]})[1]


def ask(
    fleet: Fleet, api: str, said: list[str], stream: bool, n: int = 1
) -> tuple[str, Usage, dict[str, Any]]:
    """The answer's text ("" of a stream), its usage, and the receipt of its first choice."""
    body = body_of(api, said, stream, n)
    answer = HTTP.post(f"{fleet.url}{PATHS[api]}", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    place = f"{fleet.url}{answer.headers['x-baton-receipt']}"

    def reported() -> dict[str, Any] | None:
        receipt = HTTP.get(place).raise_for_status().json()
        return receipt if receipt["prompt_sources"] else None

    if not stream:
        return *told(api, answer.json()), wait_for("a receipt", reported)
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    usage = told_by_events(api, [json.loads(each) for each in lines])
    return "", usage, wait_for("a receipt", reported)


def metric(fleet: Fleet, name: str) -> int:
    lines = HTTP.get(f"{fleet.url}/metrics").raise_for_status().text.splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(name))


def measured(fleet: Fleet) -> Usage:
    """The same by the router's metrics."""
    names = ("baton_prompt_tokens_total", "baton_cached_prompt_tokens_total")
    prompt, cached = (metric(fleet, f"{name} ") for name in names)
    return Usage(prompt, cached, metric(fleet, "baton_output_tokens_total "))


def found(receipt: dict[str, Any]) -> Counter[str]:
    """The prompt's tokens by where they were found."""
    tokens: Counter[str] = Counter()
    for part in receipt["prompt_sources"]:
        assert part["num_tokens"] >= 0
        assert part["ms"] > 0 or part["source"] == "own cache"
        tokens[part["source"]] += part["num_tokens"]
    return tokens


def test_usage_receipts_metrics_and_workers_agree(fleet: Fleet) -> None:
    topics = some(("harbour", "orchard", "library"), 2)
    said = {(api, topic): [f"{api}: {topic} " * 60] for api in PATHS for topic in topics}
    before, counted = measured(fleet), all_counters(fleet)
    total, sources = Usage(0, 0, 0), Counter[str]()
    for turn in range(TURNS):
        for (api, topic), talk in said.items():
            text, usage, receipt = ask(fleet, api, talk, stream=False)
            again = ask(fleet, api, talk, stream=True)
            assert again[1].output == usage.output
            for told_of, shown in ((usage, receipt), again[1:]):
                parts = found(shown)
                assert parts.total() == shown["num_prompt_tokens"] == told_of.prompt
                assert told_of.prompt - parts["computed"] == told_of.cached
                assert shown["num_cached_tokens"] == told_of.cached
                total, sources = total + told_of, sources + parts
            talk += [text, f"Tell me more of the {topic}, please: turn {turn}. " * 3]
    assert total == Usage(*(a - b for a, b in zip(measured(fleet), before, strict=True)))
    grown: Counter[str] = Counter()
    for name, worker in all_counters(fleet).items():
        grown.update({each: worker.get(each, 0) - counted[name].get(each, 0) for each in worker})
    assert sources["computed"] == grown["prefill_tokens"]
    assert sources["host memory"] == grown["loaded_tokens"] > 0
    assert sources["peer"] == grown["fetched_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_of_several_choices_counts_once(fleet: Fleet, stream: bool) -> None:
    for api in ("completions", "chat"):
        before = measured(fleet)
        prompt = [f"{api} {stream}: one prompt, three answers. " * 20]
        for _ in range(2):
            _, usage, receipt = ask(fleet, api, prompt, stream, n=3)
            assert usage.prompt == receipt["num_prompt_tokens"]
            assert usage.cached == receipt["num_cached_tokens"]
            assert usage.output == 3 * ANSWER
            before += usage
        assert measured(fleet) == before
