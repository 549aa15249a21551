"""A prompt that is too long is refused in the words that clients look for to shorten it."""

from __future__ import annotations

import re

import pytest

from tests.unit.gateway.api_harness import MAX_CONTEXT, MODEL

OPENAI = re.compile(
    r"This model's maximum context length is (\d+) tokens\. However, you requested "
    r"(?:at least )?(\d+) tokens"
)
TOO_MANY = "x y z " * 200


def asked(path: str, text: str, output: int) -> dict[str, object]:
    """A request of this text on any of the APIs."""
    messages = [{"role": "user", "content": text}]
    bodies: dict[str, dict[str, object]] = {
        "/v1/chat/completions": {"messages": messages, "max_tokens": output},
        "/v1/completions": {"prompt": text, "max_tokens": output},
        "/v1/responses": {"input": text, "max_output_tokens": output},
        "/v1/messages": {"messages": messages, "max_tokens": output},
    }
    return {"model": MODEL, **bodies[path]}


@pytest.mark.parametrize(("text", "output"), [(TOO_MANY, 1), ("Hi " * 600, 16), ("Hi", 5000)])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_openai_s_words(api, path, text, output):
    response = api.post(path, asked(path, text, output))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["type"] == "invalid_request_error"
    found = OPENAI.match(error["message"])
    assert found, error
    assert int(found[1]) == MAX_CONTEXT < int(found[2])


def test_openai_s_words_for_token_ids(api):
    error = api.complete([65] * 500, max_tokens=7).json()["error"]
    assert error["message"] == (
        f"This model's maximum context length is {MAX_CONTEXT} tokens. However, you requested 500 "
        "tokens in the prompt. Please reduce the length of the prompt. (context_length_exceeded)"
    )
    error = api.complete([65] * 195, max_tokens=7).json()["error"]
    assert error["message"] == (
        f"This model's maximum context length is {MAX_CONTEXT} tokens. However, you requested 202 "
        "tokens (195 in the prompt, 7 in the completion). Please reduce the length of the prompt "
        "or completion. (context_length_exceeded)"
    )


def test_anthropic_s_words(api):
    response = api.post("/v1/messages", asked("/v1/messages", TOO_MANY, 10))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    found = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", error["message"])
    assert found, error
    assert int(found[1]) > int(found[2]) == MAX_CONTEXT


def test_anthropic_s_words_if_the_output_is_too_long(api):
    error = api.post("/v1/messages", asked("/v1/messages", "Hi", 500)).json()["error"]
    found = re.match(
        r"input length and `max_tokens` exceed context limit: (\d+) \+ 500 > (\d+),",
        error["message"],
    )
    assert found, error
    assert int(found[1]) < int(found[2]) == MAX_CONTEXT


def test_a_body_that_is_too_large_is_still_a_413(api):
    for path in ("/v1/chat/completions", "/v1/messages"):
        response = api.post(path, asked(path, "x" * 200_000, 1))
        assert response.status_code == 413
