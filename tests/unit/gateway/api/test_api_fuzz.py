"""Whatever a client posts is answered in OpenAI's shape, and never with a 500.

FUZZ_EXAMPLES sets the number of inputs of each test; the suite's own number is small.
"""

from __future__ import annotations

import json
import os
import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.api.openai.chat_request import ChatRequest
from gateway.api.openai.completion_request import CompletionRequest
from tests.effort import times
from tests.unit.gateway.api_harness import MODEL, LiveApi

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", times(60, 150)))
PATHS = ("/v1/completions", "/v1/chat/completions")
FIELDS = sorted({*CompletionRequest.model_fields, *ChatRequest.model_fields} - {"model"})
ACCEPTED = {200, 400, 404, 413, 415}

fuzzing = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="FUZZ_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)

EDGES = st.sampled_from(
    [0, -1, 1, 2, 2**31, 2**63, 2**64, 10**400, 1e308, -0.0, 1e-320, True, None, "", "\x00",
     "\ud7ff", "\ud800", "😀" * 50, "<|start|>", "<|end|>", [], {}, [[]], [None], "user", "text"]
)  # fmt: skip
LEAVES = EDGES | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20) | st.booleans()
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool", "developer"]) | VALUES},
        optional={
            "content": st.text(max_size=30) | VALUES,
            "name": VALUES,
            "tool_calls": VALUES,
            "tool_call_id": VALUES,
        },
    ),
    max_size=4,
)
PROMPTS = st.text(max_size=30) | st.lists(st.integers(-2, 12_000), max_size=8) | VALUES
ALMOST_RIGHT = {
    "n": st.integers(-1, 4),
    "max_tokens": st.integers(-1, 300),
    "temperature": st.floats(-0.5, 3),
    "top_p": st.floats(-0.5, 1.5),
    "stop": st.lists(st.text(max_size=4), max_size=4) | st.text(max_size=4),
    "stream": st.booleans(),
    "echo": st.booleans(),
    "logprobs": st.integers(-1, 22) | st.booleans(),
    "prompt_logprobs": st.integers(-1, 22),
    "seed": st.integers(),
    "logit_bias": st.dictionaries(st.integers(-5, 500).map(str), st.floats(-101, 101), max_size=4),
    "stream_options": st.dictionaries(st.just("include_usage"), st.booleans()),
}


@st.composite
def requests(draw: st.DrawFn, path: str) -> dict[str, object]:
    """A request that is right but for some fields."""
    body: dict[str, object] = {"model": MODEL}
    if "chat" in path:
        body["messages"] = draw(st.just([{"role": "user", "content": "Hi"}]) | MESSAGES)
    else:
        body["prompt"] = draw(PROMPTS)
    for name in draw(st.lists(st.sampled_from(sorted(ALMOST_RIGHT)), max_size=4, unique=True)):
        body[name] = draw(ALMOST_RIGHT[name])
    for name in draw(st.lists(st.sampled_from(FIELDS), max_size=1, unique=True)):
        body[name] = draw(VALUES)
    return body


def check(api: LiveApi, path: str, content: bytes, media_type: str = "application/json") -> int:
    """Posts, and checks the answer; its status."""
    answer = api.http.post(path, content=content, headers={"content-type": media_type})
    assert answer.status_code in ACCEPTED, (answer.status_code, answer.text, content)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
    elif answer.headers["content-type"].startswith("text/event-stream"):
        events = [line for line in answer.text.split("\n\n") if line]
        assert events[-1] == "data: [DONE]", (events[-1], content)
    else:
        assert answer.json()["choices"]
    return answer.status_code


@pytest.mark.parametrize("path", PATHS)
def test_bytes(running_api: LiveApi, path: str) -> None:
    running_api.reset()

    @fuzzing
    @given(st.binary(max_size=200) | st.text(string.printable, max_size=200).map(str.encode))
    def run(content: bytes) -> None:
        assert check(running_api, path, content) == 400

    run()


@pytest.mark.parametrize("path", PATHS)
def test_any_json(running_api: LiveApi, path: str) -> None:
    running_api.reset()

    @fuzzing
    @given(VALUES)
    def run(value: object) -> None:
        assert check(running_api, path, json.dumps(value).encode()) == 400

    run()


@pytest.mark.parametrize("path", PATHS)
def test_requests_that_are_almost_right(running_api: LiveApi, path: str) -> None:
    running_api.reset()
    seen: set[int] = set()

    @fuzzing
    @given(requests(path))
    def run(body: dict[str, object]) -> None:
        seen.add(check(running_api, path, json.dumps(body).encode()))

    run()
    assert {200, 400} <= seen, "the strategy reaches both sides"
    running_api.generator.wait_idle()


@pytest.mark.parametrize("path", PATHS)
def test_broken_copies_of_a_right_request(running_api: LiveApi, path: str) -> None:
    running_api.reset()
    right = {"model": MODEL, "prompt": "Hi", "max_tokens": 3, "stop": ["x"], "seed": 1}
    if "chat" in path:
        right["messages"] = [{"role": "user", "content": "Hi"}]
        del right["prompt"]
    whole = json.dumps(right).encode()
    seen: set[int] = set()

    @fuzzing
    @given(st.integers(0, len(whole) - 1), st.integers(0, 5), st.binary(max_size=4))
    def run(at: int, removed: int, added: bytes) -> None:
        seen.add(check(running_api, path, whole[:at] + added + whole[at + removed :]))

    run()
    assert {200, 400} <= seen, "some were still right"
    running_api.generator.wait_idle()


@pytest.mark.parametrize("depth", [100, 10_000, 45_000])
@pytest.mark.parametrize("path", PATHS)
def test_deep_nesting(running_api: LiveApi, path: str, depth: int) -> None:
    running_api.reset()
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        if len(opening) * depth > 95_000:
            continue
        nested = opening * depth + "1" + closing * depth
        body = b'{"model": "tiny", "prompt": %s}' % nested.encode()
        assert check(running_api, path, body) == 400
        assert check(running_api, path, (opening * depth).encode()) == 400
