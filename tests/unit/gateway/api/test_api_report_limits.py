"""What an answer may report is bounded before anything is generated."""

from __future__ import annotations

import pytest

from gateway.api import choice_planner
from tests.unit.gateway.api_harness import MODEL, LiveApi

PROMPT_TOKENS = 100


@pytest.fixture(autouse=True)
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice_planner, "MAX_REPORTED_VALUES", 3000)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 20, "n": 2}, "prompt_logprobs"),
        ({"prompt_logprobs": 20, "n": 2, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "n": 31}, "prompt_logprobs"),
        ({"logprobs": 20, "echo": True, "n": 2}, "logprobs"),
        ({"echo": True, "n": 31}, "n"),
        ({"return_token_ids": True, "n": 31}, "n"),
        ({"prompt": [[65] * PROMPT_TOKENS] * 2, "prompt_logprobs": 20}, "prompt_logprobs"),
        ({"logprobs": 20, "max_tokens": 72, "n": 2}, "logprobs"),
        ({"logprobs": 20, "max_tokens": 36, "best_of": 4}, "logprobs"),
    ],
)
def test_more_than_the_limit_is_refused_with_the_fields(
    api: LiveApi, fields: dict[str, object], param: str
) -> None:
    body = {"model": MODEL, "prompt": [65] * PROMPT_TOKENS, **fields}
    response = api.post("/v1/completions", body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert "3000" in error["message"]
    assert "'n'" in error["message"]
    assert api.generator.requests == []


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_logprobs": 20},
        {"prompt_logprobs": 0, "n": 30},
        {"prompt_logprobs": 20, "n": 2, "truncate_prompt_tokens": 50},
        {"prompt_logprobs": 20, "best_of": 2},
        {"logprobs": 20, "max_tokens": 71, "n": 2},
        {"logprobs": 20, "max_tokens": 72, "n": 2, "stream": True},
        {"n": 100},
    ],
)
def test_up_to_the_limit_is_served(api: LiveApi, fields: dict[str, object]) -> None:
    body = {"model": MODEL, "prompt": [65] * PROMPT_TOKENS, **fields}
    response = api.post("/v1/completions", body)
    assert response.status_code == 200, response.text


def test_a_chat_reports_its_prompt_once_or_once_in_each_stream(api: LiveApi) -> None:
    asked = {"prompt_logprobs": 20, "n": 2}
    text = "x" * 60
    assert api.chat(text, **asked).status_code == 200
    response = api.chat(text, **asked, stream=True)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt_logprobs"


def test_an_output_without_a_limit_ends_where_the_answer_is_full(api: LiveApi) -> None:
    assert api.chat(logprobs=True, top_logprobs=20, n=2).status_code == 200
    limits = [request.sampling.max_tokens for request in api.generator.requests]
    assert limits == [3000 // 21 // 2] * 2


def test_an_output_without_a_limit_has_a_token_at_least(
    api: LiveApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice_planner, "MAX_REPORTED_VALUES", 20)
    assert api.chat(logprobs=True, top_logprobs=20).status_code == 200
    [request] = api.generator.requests
    assert request.sampling.max_tokens == 1
