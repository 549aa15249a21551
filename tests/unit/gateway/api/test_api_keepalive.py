"""Streams that are silent for long, before their first token and after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from openai._streaming import SSEDecoder

from gateway.api.context import ApiLimits
from gateway.text.tokenizer import Tokenizer
from protocol.errors import Overloaded
from router.requests.interface import GenerationRequest
from tests.unit.gateway.api_harness import LiveApi, Pause, Step, events_of

KEEPALIVE_S = 0.02
COMMENT = ": keep-alive\n"


@pytest.fixture(scope="module")
def impatient_api(checkpoint: Path, tokenizer: Tokenizer) -> Iterator[LiveApi]:
    with LiveApi(checkpoint, tokenizer, ApiLimits(keepalive_s=KEEPALIVE_S)) as live:
        yield live


def pausing(api: LiveApi, at: int, *end: Exception) -> Callable[[], None]:
    """Makes generations wait before delta `at`; returns what lets them go on."""
    api.reset()
    api.says("one two")
    pause, usual = Pause(), api.generator.script

    def script(request: GenerationRequest) -> list[Step]:
        steps = list(usual(request))
        return [*steps[:at], pause, *end, *steps[at:]]

    api.generator.script = script
    return pause.end


@pytest.mark.parametrize("accept", ["text/event-stream", "*/*"])
@pytest.mark.parametrize("at", [0, 2])
def test_comments_fill_a_silence(impatient_api: LiveApi, at: int, accept: str) -> None:
    go_on = pausing(impatient_api, at)
    body = {"model": "tiny", "prompt": "x", "max_tokens": 50, "stream": True}
    text = ""
    with impatient_api.http.stream(
        "POST", "/v1/completions", json=body, headers={"accept": accept}
    ) as answer:
        assert answer.status_code == 200
        for part in answer.iter_text():
            text += part
            if text.count(COMMENT) >= 3:
                go_on()
    assert text.count(COMMENT) >= 3
    assert text.startswith(COMMENT) or at > 0  # a slow machine is silent elsewhere, too
    events = events_of(text.replace(COMMENT, ""))
    assert "".join(event["choices"][0]["text"] for event in events) == "one two"
    # To OpenAI's client an empty line ends an event, if any before it had an id.
    assert all(each.data for each in SSEDecoder().iter_bytes(iter([text.encode()])))
    # Load generators skip what begins with a comment up to an empty line.
    parts = text.split("\n\n")
    assert any(each.startswith(COMMENT) and "data" in each for each in parts) == (accept != "*/*")


def test_an_error_after_a_comment_is_an_event(impatient_api: LiveApi) -> None:
    go_on = pausing(impatient_api, 0, Overloaded("no worker is ready"))
    before = impatient_api.metric("baton_http_stream_errors_total")
    body = {"model": "tiny", "prompt": "x", "stream": True}
    text = ""
    with impatient_api.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        for part in answer.iter_text():
            text += part
            go_on()
    assert text.startswith(COMMENT)
    assert '"no worker is ready"' in text
    assert "[DONE]" not in text
    name = "baton_http_stream_errors_total"
    impatient_api.settle(lambda: impatient_api.metric(name) == before + 1)


def test_a_client_that_leaves_before_the_first_token_ends_the_generation(
    impatient_api: LiveApi,
) -> None:
    pausing(impatient_api, 0)
    gone = {"endpoint": "/v1/completions", "status": "499"}
    before = impatient_api.metric("baton_http_requests_total", **gone)
    body = {"model": "tiny", "prompt": "x", "stream": True}
    with impatient_api.http.stream("POST", "/v1/completions", json=body) as answer:
        parts = answer.iter_text()  # kept: httpx closes the connection when it goes
        next(parts)
        impatient_api.generator.wait_active(1)
    impatient_api.generator.wait_idle()
    name = "baton_http_requests_total"
    impatient_api.settle(lambda: impatient_api.metric(name, **gone) == before + 1)
