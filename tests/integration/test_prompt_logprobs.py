"""Log-probabilities of a prompt are those of transformers, whichever worker prefills.

A cached prefix does not change them. In fp32, in chunks of 32 tokens, on prompts of telling
lengths.
"""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from cli.fleet import Fleet
from tests.http_client import HTTP
from tests.integration.fleets import complete, counters, running_fleet
from tests.integration.openai_types import post
from tests.integration.reference import DEMO_MODEL

CHUNK = 32
LENGTHS = (1, 2, 15, 16, 17, CHUNK, CHUNK + 1, 4 * CHUNK - 1, 4 * CHUNK, 4 * CHUNK + 1, 300)
PATHS: dict[str, dict[str, Any]] = {
    "apart": {"prefill": 1, "decode": 1, "local_prefill_threshold_tokens": 0},
    "local": {"prefill": 0, "decode": 1},
}
TEXT = pydoc_data.topics.topics["lambda"]
TOKENIZER = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
CLOSE = {"abs": 2e-4}
Expected = Callable[[list[int]], torch.Tensor]


@pytest.fixture(scope="module", params=PATHS)
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    with running_fleet(chunk_max_tokens=CHUNK, dtype="float32", **PATHS[request.param]) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def expected() -> Expected:
    """`expected(ids)`: transformers' log-probabilities [N - 1, vocab] of what follows."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logprobs(token_ids: list[int]) -> torch.Tensor:
        return model(torch.tensor([token_ids])).logits[0, :-1].log_softmax(dim=-1)

    return logprobs


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in ("with", "lambda", "class"))
    return TOKENIZER.encode(text).ids


def check(told: list[Any], prompt: list[int], expected: Expected, count: int) -> None:
    """vLLM's shape, with transformers' numbers."""
    assert len(told) == len(prompt)
    assert told[0] is None
    for place, (token_id, row) in enumerate(zip(prompt[1:], expected(prompt), strict=True), 1):
        own, *others = told[place].items()
        assert own[0] == str(token_id)
        assert own[1]["logprob"] == pytest.approx(row[token_id].item(), **CLOSE)
        by_rank = {each["rank"]: each["logprob"] for _, each in (own, *others)}
        best = row.topk(max(count, 1)).values.tolist()
        for rank in range(1, count + 1):
            assert by_rank[rank] == pytest.approx(best[rank - 1], **CLOSE)
        rank = 1 + int((row > row[token_id]).sum())
        is_tied = int(((row - row[token_id]).abs() < 1e-3).sum()) > 1
        assert own[1]["rank"] == rank or is_tied
        assert len(others) == count - (own[1]["rank"] <= count)


def test_they_are_those_of_transformers_in_chunks_and_with_a_warm_cache(
    fleet: Fleet, tokens: list[int], expected: Expected
) -> None:
    for length in LENGTHS:
        prompt = tokens[:length]  # each is a prefix of the next: cached, but for its end
        plain = complete(fleet, prompt, max_tokens=4)["choices"][0]
        answer = complete(fleet, prompt, max_tokens=4, prompt_logprobs=3)
        [choice] = answer["choices"]
        check(choice["prompt_logprobs"], prompt, expected, 3)
        assert choice["token_ids"] == plain["token_ids"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    again = complete(fleet, tokens[:300], max_tokens=4)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 288
    handoffs = counters(fleet, "decode-1")["handoffs"]
    assert (handoffs > 0) == ("prefill-1" in fleet.processes), "the path that was meant"


def test_every_choice_tells_of_its_own_prompt(
    fleet: Fleet, tokens: list[int], expected: Expected
) -> None:
    prompts = [tokens[400:500], tokens[500:540]]
    body = {"model": DEMO_MODEL.name, "prompt": prompts, "n": 2, "max_tokens": 2}
    choices = post(fleet.url, "/v1/completions", body | {"prompt_logprobs": 0})["choices"]
    assert [len(each["prompt_logprobs"]) for each in choices] == [100, 100, 40, 40]
    for index, choice in enumerate(choices):
        check(choice["prompt_logprobs"], prompts[index // 2], expected, 0)


def test_the_prompt_of_a_chat(fleet: Fleet, expected: Expected) -> None:
    body = {
        "model": DEMO_MODEL.name,
        "messages": [{"role": "user", "content": "What is a lambda?"}],
        "max_tokens": 4,
        "prompt_logprobs": 2,
        "return_token_ids": True,
    }
    answer = post(fleet.url, "/v1/chat/completions", body)
    check(answer["prompt_logprobs"], answer["prompt_token_ids"], expected, 2)
    decoded = [next(iter(each.values()))["decoded_token"] for each in answer["prompt_logprobs"][1:]]
    assert "user\nWhat is a lambda?" in "".join(decoded)


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_an_echoed_prompt_is_told_of_as_the_output_is(
    fleet: Fleet, expected: Expected, max_tokens: int
) -> None:
    prompt = TEXT[:150] + " \N{ROCKET} "
    answer = HTTP.post(
        f"{fleet.url}/v1/completions",
        json={
            "model": DEMO_MODEL.name,
            "prompt": prompt,
            "echo": True,
            "logprobs": 2,
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
        },
    ).json()
    [choice] = answer["choices"]
    listed, ids = choice["logprobs"], choice["prompt_token_ids"] + choice["token_ids"]
    assert choice["text"].startswith(prompt)
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"]) == max_tokens
    assert {len(each) for each in listed.values()} == {len(ids)}
    assert listed["token_logprobs"][0] is listed["top_logprobs"][0] is None
    for place, (token_id, row) in enumerate(zip(ids[1:], expected(ids), strict=True), 1):
        logprob = pytest.approx(row[token_id].item(), **CLOSE)
        assert listed["token_logprobs"][place] == logprob
        assert listed["top_logprobs"][place][listed["tokens"][place]] == logprob
        assert max(listed["top_logprobs"][place].values()) == pytest.approx(
            row.max().item(), **CLOSE
        )
    for token, offset in zip(listed["tokens"], listed["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert choice["text"][offset:].startswith(token)
