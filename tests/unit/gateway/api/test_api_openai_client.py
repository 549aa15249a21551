"""OpenAI's own client, unchanged, against the API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import openai
import pytest

from protocol.errors import DeadlineExceeded, Overloaded
from protocol.messages import FinishReason
from tests.unit.gateway.api_harness import MODEL, TIMEOUT_S, Forever, LiveApi, Pause, token_steps

MESSAGES = [{"role": "user", "content": "Say it"}]
SAYING = "Hello wörld 你好 😀"


@pytest.fixture
def client(api: LiveApi) -> Iterator[openai.OpenAI]:
    api.says(SAYING)
    with openai.OpenAI(
        base_url=f"{api.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as each:
        yield each


@pytest.fixture
async def async_client(api: LiveApi) -> AsyncIterator[openai.AsyncOpenAI]:
    api.says(SAYING)
    async with openai.AsyncOpenAI(
        base_url=f"{api.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as each:
        yield each


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).created == 1_700_000_000


def test_chat(client, api):
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", SAYING)
    assert choice.finish_reason == "stop"
    request = api.generator.requests[0]
    assert api.tokenizer.decode(request.token_ids, skip_special_tokens=False) == (
        "<|start|>user\nSay it<|end|>\n<|start|>assistant\n"
    )
    assert request.request_id == f"{answer.id}-0"
    assert answer.usage.prompt_tokens == len(request.token_ids)
    assert answer.usage.completion_tokens == len(api.tokenizer.encode(SAYING, False)) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


def test_chat_stream(client):
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SAYING
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage.completion_tokens > 0
    assert len({chunk.id for chunk in [*chunks, last]}) == 1


def test_chat_stream_helper_accumulates_the_same(client):
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == SAYING
    assert final.choices[0].finish_reason == "stop"


def test_completion(client, api):
    api.says(SAYING, FinishReason.LENGTH)
    answer = client.completions.create(model=MODEL, prompt="Say it", max_tokens=100)
    assert answer.choices[0].text == SAYING
    assert answer.choices[0].finish_reason == "length"


def test_completion_stream_of_several_prompts_and_choices(client):
    stream = client.completions.create(
        model=MODEL, prompt=["a", "b"], n=2, max_tokens=100, stream=True
    )
    texts = dict.fromkeys(range(4), "")
    ends: list[int] = []
    for chunk in stream:
        choice = chunk.choices[0]
        texts[choice.index] += choice.text
        ends += [choice.index] if choice.finish_reason else []
    assert set(texts.values()) == {SAYING}
    assert sorted(ends) == [0, 1, 2, 3]


async def test_async_chat_and_completion(async_client):
    chat, completion = await asyncio.gather(
        async_client.chat.completions.create(model=MODEL, messages=MESSAGES),
        async_client.completions.create(model=MODEL, prompt=[65, 66], max_tokens=100),
    )
    assert chat.choices[0].message.content == completion.choices[0].text == SAYING


async def test_many_async_streams_at_once(async_client, api):
    pause = Pause()

    def own_text(request):
        text = f"{SAYING} to {api.tokenizer.decode(request.token_ids)}"
        ids = api.tokenizer.encode(text, add_special_tokens=False)
        return [pause, *token_steps(request, ids, FinishReason.STOP, api.tokenizer)]

    api.generator.script = own_text

    async def one(number: int) -> str:
        stream = await async_client.completions.create(
            model=MODEL, prompt=f"caller {number}", max_tokens=100, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def release() -> None:
        await asyncio.to_thread(api.generator.wait_active, 32)
        pause.end()

    *texts, _ = await asyncio.gather(*[one(number) for number in range(32)], release())
    assert texts == [f"{SAYING} to caller {number}" for number in range(32)]


def test_logprobs_of_chat(client, api):
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert b"".join(bytes(token.bytes) for token in content).decode() == f"{SAYING}<|end|>"
    assert len(content) == len(api.tokenizer.encode(SAYING, False)) + 1
    assert [len(token.top_logprobs) for token in content] == [2] * len(content)
    whole = [token for token in content if not token.token.startswith("bytes:")]
    assert all(token.token.encode() == bytes(token.bytes) for token in whole)
    assert len(whole) < len(content)


def test_logprobs_of_completions(client):
    choice = client.completions.create(model=MODEL, prompt="x", max_tokens=100, logprobs=1).choices[
        0
    ]
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset)
    for token, offset, top in zip(
        logprobs.tokens, logprobs.text_offset, logprobs.top_logprobs, strict=True
    ):
        assert top[token] == -0.5
        if not token.startswith("bytes:"):
            assert f"{choice.text}<|end|>".startswith(token, offset)


def test_errors_become_the_client_s_own(client, api):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=3)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("other/model")
    assert missing.value.code == "model_not_found"
    api.generator.script = lambda request: [Overloaded("no worker is ready", retry_after_s=3)]
    with pytest.raises(openai.InternalServerError) as overloaded:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    assert overloaded.value.status_code == 503
    assert overloaded.value.response.headers["retry-after"] == "3"


def test_a_request_whose_time_is_over_is_not_sent_again(client, api):
    api.generator.script = lambda request: [DeadlineExceeded("it took too long")]
    patient = client.with_options(max_retries=2)
    with pytest.raises(openai.InternalServerError, match="it took too long"):
        patient.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert len(api.generator.requests) == 1


def test_an_error_in_mid_stream_reaches_the_client(client, api):
    steps = api.generator.script
    api.generator.script = lambda request: [*steps(request)[:3], Overloaded("gone")]
    stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="gone"):
        list(stream)


def test_closing_a_stream_ends_the_generation(client, api):
    steps = api.generator.script
    api.generator.script = lambda request: [*steps(request)[:3], Forever()]
    stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, n=3)
    next(iter(stream))
    api.generator.wait_active(3)
    stream.close()
    api.generator.wait_idle()
