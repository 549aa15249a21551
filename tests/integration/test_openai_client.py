"""The `openai` and `anthropic` packages, unchanged, against a real fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Literal

import anthropic
import openai
import pytest
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, ConfigDict

from cli.fleet import Fleet
from cli.pods.check import main as check
from tests.integration.fleets import running_fleet, wait_for
from tests.integration.reference import DEMO_MODEL

MODEL = DEMO_MODEL.name
QUESTION = [{"role": "user", "content": "What is a lambda?"}]
PROMPT = "The with statement is used to wrap the execution of a block with methods defined by a "
ANSWER = (
    "Lambda expressions (sometimes called lambda forms) are used to create anonymous functions."
)


RUNS = ("queued", "in_progress")
ENDLESS = {"schema": {"type": "array", "items": {"const": 1}, "minItems": 2000}}


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with running_fleet(decode=2) as fleet:
        yield fleet


@pytest.fixture
def client(fleet: Fleet) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def chat(fleet: Fleet) -> ChatCompletion:
    """The greedy answer to the question, to its end."""
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0) as client:
        return client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_check_finds_that_both_pools_serve(fleet: Fleet, capsys) -> None:
    for _ in range(2):  # the prompt is new each time: no cache lets a decode worker serve it alone
        assert check([f"--router-url={fleet.url}", "--both-pools"]) == 0
        assert "16 tokens by prefill-1 and decode-" in capsys.readouterr().out


def test_chat(chat: ChatCompletion) -> None:
    assert chat.choices[0].message.content.startswith(ANSWER)
    assert chat.choices[0].finish_reason == "stop"
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens


def test_streamed_chat_is_the_same_text(client: openai.OpenAI, chat: ChatCompletion) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == chat.choices[0].message.content
    assert len(chunks) > 20
    assert chunks[-1].usage == chat.usage or chunks[-1].usage.completion_tokens == (
        chat.usage.completion_tokens
    )


def test_async_streams_side_by_side(fleet: Fleet) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(one(client) for _ in range(12)))

    async def one(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    texts = asyncio.run(run())
    assert len(set(texts)) == 1
    assert texts[0].startswith(ANSWER)


def test_completions_with_n_logprobs_stop_and_seed(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=12, n=3, logprobs=2, seed=5, temperature=0.8
    )
    again = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=12, n=3, logprobs=2, seed=5, temperature=0.8
    )
    assert [c.text for c in again.choices] == [c.text for c in answer.choices]
    for choice in answer.choices:
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs)
        assert all(value <= 0 for value in choice.logprobs.token_logprobs)
    greedy = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=40, temperature=0)
    word = greedy.choices[0].text.split()[4]
    stopped = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=40, temperature=0, stop=[word]
    )
    assert stopped.choices[0].text == greedy.choices[0].text.partition(word)[0]
    assert stopped.choices[0].finish_reason == "stop"


def test_echo_and_lists_of_prompts(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=[PROMPT, "A class definition "], max_tokens=5, echo=True, temperature=0
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text.startswith(PROMPT)
    assert answer.choices[1].text.startswith("A class definition ")


def test_errors_are_the_clients_own_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-5"):
        client.chat.completions.create(model="gpt-5", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=-1)
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model=MODEL, prompt=[1] * 5000, max_tokens=1)
    assert raised.value.code == "context_length_exceeded"
    assert "4096" in raised.value.message
    assert "5000" in raised.value.message


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_says_where_its_time_went(client: openai.OpenAI, streamed: bool) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt=[300 + streamed] * 200,
        n=2,
        max_tokens=5,
        stream=streamed,
        extra_headers={"x-baton-timing": "1"},
        extra_body={"ignore_eos": True},
    )
    shown = [each.model_extra.get("baton") for each in answer] if streamed else [answer.baton]
    assert [each is not None for each in shown] == [False] * (len(shown) - 1) + [True]
    first, second = shown[-1]["choices"]
    assert (first["index"], second["index"]) == (0, 1)
    assert first["placement"]["mode"] == "remote"
    assert (first["placement"]["prefill"], first["placement"]["decode"][:6]) == (
        "prefill-1",
        "decode",
    )
    assert first["ttft_ms"] > 0
    assert first["decode_ms"] is not None
    prompt = [first[name] for name in ("queue_ms", "prefill_ms", "handoff_ms")]
    if prompt != [None, None, None]:  # all tokens may overtake the prefill worker's trace
        assert min(prompt) >= 0
        assert first["ttft_ms"] >= first["prefill_ms"] > 0


def test_a_wish_for_timing_is_yes_or_no(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="x-baton-timing"):
        client.chat.completions.create(
            model=MODEL, messages=QUESTION, extra_headers={"x-baton-timing": "maybe"}
        )


def test_responses_whole_and_streamed(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "input": QUESTION[0]["content"], "temperature": 0}
    whole = client.responses.create(**asked)
    assert whole.output_text.startswith(ANSWER)
    with client.responses.stream(**asked) as stream:
        deltas = [each.delta for each in stream if each.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == whole.output_text
    assert len(deltas) > 20
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_responses_are_continued_by_their_ids(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "temperature": 0, "max_output_tokens": 20}
    first = client.responses.create(input=QUESTION[0]["content"], **asked)
    *_, last = client.responses.create(
        input="And a closure?", previous_response_id=first.id, stream=True, **asked
    )
    second = last.response
    items = [*QUESTION, *first.output, {"role": "user", "content": "And a closure?"}]
    whole = client.responses.create(input=items, store=False, **asked)
    assert second.output_text == whole.output_text
    assert second.usage.input_tokens == whole.usage.input_tokens
    assert client.responses.retrieve(second.id) == second
    assert len(client.responses.input_items.list(second.id).data) == 3
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    client.responses.create(input="And?", previous_response_id=second.id, **asked)


def test_a_response_in_the_background(client: openai.OpenAI, chat: ChatCompletion) -> None:
    def run(response_id: str) -> Any:
        return wait_for(
            "the response",
            lambda: (found := client.responses.retrieve(response_id)).status not in RUNS and found,
        )

    asked = {"model": MODEL, "temperature": 0, "input": QUESTION[0]["content"]}
    began = client.responses.create(background=True, **asked)
    assert began.status == "queued"
    ended = run(began.id)
    assert ended.status == "completed"
    assert ended.output_text == chat.choices[0].message.content
    long = {"extra_body": {"text": {"format": {"type": "json_schema", "name": "n", **ENDLESS}}}}
    second = client.responses.create(background=True, **asked, **long)
    cancelled = client.responses.cancel(second.id)
    assert cancelled.status in ("cancelled", "incomplete")
    assert run(second.id).status == cancelled.status


def test_anthropics_client_whole_and_streamed(fleet: Fleet, chat: ChatCompletion) -> None:
    asked = {"model": MODEL, "max_tokens": 500, "messages": QUESTION}
    greedy = {"extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=fleet.url, api_key="none", max_retries=0) as other:
        whole = other.messages.create(**asked, **greedy)
        with other.messages.stream(**asked, **greedy) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        counted = other.messages.count_tokens(model=MODEL, messages=QUESTION)
    assert text == whole.content[0].text == chat.choices[0].message.content
    assert whole.stop_reason == final.stop_reason == "end_turn"
    assert whole.usage.output_tokens == final.usage.output_tokens == chat.usage.completion_tokens
    assert counted.input_tokens == chat.usage.prompt_tokens


def test_an_agent_asks_a_tool_turn_after_turn(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "temperature": 0,
        "tools": [openai.pydantic_function_tool(Weather)],
        "parallel_tool_calls": False,
        "max_completion_tokens": 60,
    }
    messages: list[Any] = list(QUESTION)
    usages = []
    for _turn in range(3):
        with client.chat.completions.stream(
            messages=messages,
            tool_choice="required",
            stream_options={"include_usage": True},
            **asked,
        ) as stream:
            final = stream.get_final_completion()
        message = final.choices[0].message
        [call] = message.tool_calls
        assert isinstance(call.function.parsed_arguments, Weather)
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        usages.append(final.usage)
    last = client.chat.completions.create(messages=messages, tool_choice="none", **asked)
    assert last.choices[0].message.content
    usages.append(last.usage)
    for before, after in pairwise(usages):
        assert after.prompt_tokens > before.prompt_tokens
        assert after.prompt_tokens_details.cached_tokens > before.prompt_tokens // 2


@pytest.mark.parametrize("tools", [[], [openai.pydantic_function_tool(Weather)]])
def test_answers_are_parsed_into_types_with_tools_and_without(
    client: openai.OpenAI, tools: list[Any]
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0}
    if tools:
        asked |= {"tools": tools, "parallel_tool_calls": False}
    chat = client.chat.completions.parse(messages=QUESTION, response_format=Weather, **asked)
    message = chat.choices[0].message
    assert isinstance(message.parsed, Weather) or message.tool_calls
    assert tools or message.parsed
    if not tools:
        response = client.responses.parse(
            model=MODEL, input=QUESTION, text_format=Weather, temperature=0
        )
        assert response.output_parsed == message.parsed


def test_anthropics_client_streams_a_call(fleet: Fleet) -> None:
    tool = {"name": "weather", "input_schema": Weather.model_json_schema()}
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 60, "messages": QUESTION}
    asked |= {"extra_body": {"temperature": 0}}
    one = {"type": "any", "disable_parallel_tool_use": True}
    with anthropic.Anthropic(base_url=fleet.url, api_key="none", max_retries=0) as client:
        with client.messages.stream(tools=[tool], tool_choice=one, **asked) as stream:
            pieces = [each.partial_json for each in stream if each.type == "input_json"]
            message = stream.get_final_message()
    [call] = message.content
    assert Weather.model_validate(call.input) == Weather.model_validate_json("".join(pieces))
    assert len(pieces) > 1
    assert message.stop_reason == "tool_use"
