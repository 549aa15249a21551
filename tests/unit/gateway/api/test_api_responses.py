"""OpenAI's own client, unchanged, against `/v1/responses`."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from protocol.errors import Overloaded
from protocol.messages import FinishReason
from tests.unit.gateway.api_clients import ARGUMENTS, CALL, SCHEMA, SHORT_CALL, THINKING
from tests.unit.gateway.api_harness import (
    MAX_CONTEXT,
    MODEL,
    TIMEOUT_S,
    Forever,
    LiveApi,
    events_of,
)

TOOLS = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}]
SAYING = "Hello wörld 你好 😀"
THOUGHT = [{"type": "reasoning_text", "text": "Hm"}]
WHERE = '{"city": "Köln"}'
IMAGE = [{"role": "user", "content": [{"type": "input_image"}]}]
LOGPROBS = "message.output_text.logprobs"
EVENT = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def running_api(tools_api: LiveApi) -> LiveApi:
    return tools_api


@pytest.fixture
def client(api: LiveApi) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{api.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as each:
        yield each


def ask(client: openai.OpenAI, **fields) -> Response:
    return client.responses.create(**{"model": MODEL, "input": "Say it", **fields})


def prompt_of(api: LiveApi) -> str:
    return api.tokenizer.decode(api.generator.requests[-1].token_ids, False)


def test_text(client, api):
    api.says(SAYING)
    answer = ask(client, instructions="Be short", metadata={"a": "b"}, max_output_tokens=99)
    assert answer.output_text == SAYING
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert (answer.metadata, answer.max_output_tokens, answer.store) == ({"a": "b"}, 99, False)
    request = api.generator.requests[0]
    assert answer.usage.input_tokens == len(request.token_ids)
    assert answer.usage.input_tokens_details.cached_tokens == 2
    assert answer.usage.output_tokens == len(api.tokenizer.encode(SAYING, False)) + 1
    assert request.sampling.max_tokens == 99
    assert prompt_of(api) == (
        "<|start|>system\nBe short<|end|>\n<|start|>user\nSay it<|end|>\n<|start|>assistant\n"
    )


def test_an_answer_has_the_fields_of_strict_clients(api):
    """OpenRouter's client, which people also use with servers of their own, requires them."""
    asked = {"model": MODEL, "input": "Say it"}
    answer = api.post("/v1/responses", asked).json()
    assert (answer["presence_penalty"], answer["frequency_penalty"]) == (0, 0)
    answer = api.post("/v1/responses", {**asked, "presence_penalty": 1}).json()
    assert (answer["presence_penalty"], answer["frequency_penalty"]) == (1, 0)
    for send in (api.chat, api.complete):
        assert send().json()["system_fingerprint"] is None
        events = events_of(send(stream=True, stream_options={"include_usage": True}).text)
        assert [each["system_fingerprint"] for each in events] == [None] * len(events)


def test_an_answer_that_reaches_its_limit_is_incomplete(client, api):
    api.says("one two three", FinishReason.LENGTH)
    answer = ask(client)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"
    events = list(ask(client, stream=True))
    assert events[-1].type == "response.incomplete"


def test_reasoning_and_calls(client, api):
    api.says(THINKING + "I ask." + CALL)
    answer = ask(client, tools=TOOLS)
    reasoning, message, call = answer.output
    assert [part.text for part in reasoning.content] == ["Let me see"]
    assert answer.output_text == message.content[0].text == "I ask."
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "weather",
        ARGUMENTS,
    )
    assert answer.status == "completed"
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    assert len({item.id for item in answer.output}) == 3


def test_a_stream_says_the_same(client, api):
    api.says(THINKING + "I ask." + CALL)
    whole = ask(client, tools=TOOLS)
    with client.responses.stream(model=MODEL, input="Say it", tools=TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output_text == whole.output_text
    assert final.output[0].content == whole.output[0].content
    assert final.output[2].arguments == whole.output[2].arguments
    assert final.usage == whole.usage
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")]
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == "I ask."
    assert [each.is_resumable for each in api.generator.requests] == [False, True]


def test_every_event_is_one_of_openais_and_in_order(api):
    api.says(THINKING + "I ask." + CALL)
    body = {"model": MODEL, "input": "Say it", "tools": TOOLS, "stream": True}
    names, items = [], {}
    for number, frame in enumerate(api.post("/v1/responses", body).text.strip().split("\n\n")):
        _, name, data = frame.split("\n")
        event = EVENT.validate_json(data.removeprefix("data: "), strict=True)
        assert event.type == name.removeprefix("event: ")
        assert event.sequence_number == number
        assert not event.model_extra or set(event.model_extra) <= {"name"}
        names.append(event.type)
        if event.type == "response.output_item.done":
            items[event.output_index] = event.item
    assert names[:2] == ["response.created", "response.in_progress"]
    assert names[-1] == "response.completed"
    assert event.response.output == [items[index] for index in range(3)]
    for kind in ("output_item", "content_part"):
        assert names.count(f"response.{kind}.added") == names.count(f"response.{kind}.done")


def test_logprobs_are_those_of_the_text_alone(client, api):
    api.says(THINKING + "I ask wörld." + CALL)
    asked = {"tools": TOOLS, "include": [LOGPROBS], "top_logprobs": 2}
    answer = ask(client, **asked)
    assert [each.sampling.logprobs for each in api.generator.requests] == [2]
    told = answer.output[1].content[0].logprobs
    assert b"".join(bytes(each.bytes) for each in told).decode() == "I ask wörld."
    assert {len(each.top_logprobs) for each in told} == {2}
    assert {each.logprob for each in told} == {-0.5}
    assert (answer.top_logprobs, ask(client).top_logprobs) == (2, 0)
    events = list(ask(client, stream=True, **asked))
    deltas = [each for each in events if each.type == "response.output_text.delta"]
    shown = [each for delta in deltas for each in delta.logprobs]
    assert [each.token for each in shown] == [each.token for each in told]
    assert [len(each.top_logprobs) for each in shown] == [2] * len(shown)
    assert all("bytes" not in each.model_dump() for each in shown), "as in OpenAI's events"
    [done] = [each for each in events if each.type == "response.output_text.done"]
    assert [each.model_dump() for each in done.logprobs] == [each.model_dump() for each in shown]
    assert events[-1].response.output[1].content[0].logprobs == told
    ask(client, input=[*answer.output, {"role": "user", "content": "x"}], max_output_tokens=9)


def test_without_a_wish_there_are_no_logprobs(client, api):
    answer = ask(client)
    assert answer.output[0].content[0].logprobs == []
    assert api.generator.requests[0].sampling.logprobs is None


TURNS = [
    message
    for number in range(9)
    for message in (
        {"role": "user", "content": f"Question {number}"},
        {"role": "assistant", "content": f"Answer {number}"},
    )
]


@pytest.mark.parametrize("output", [1, 13, 20, 31, 44])
def test_truncation_drops_the_oldest_turns_and_no_more(client, api, output):
    asked = {"input": [*TURNS, {"role": "user", "content": "Last"}], "max_output_tokens": output}
    with pytest.raises(openai.APIStatusError) as caught:
        ask(client, **asked, instructions="Be short")
    assert caught.value.status_code == 400
    answer = ask(client, **asked, instructions="Be short", truncation="auto")
    assert answer.truncation == "auto"
    prompt = prompt_of(api)
    assert prompt.startswith("<|start|>system\nBe short<|end|>\n<|start|>user\nQuestion ")
    assert prompt.endswith("<|start|>user\nLast<|end|>\n<|start|>assistant\n")
    first = int(prompt.partition("Question ")[2][0])
    assert [prompt.count(f"Question {number}") for number in range(9)] == [
        int(number >= first) for number in range(9)
    ]
    turn = len(api.tokenizer.encode("".join(_rendered(each) for each in TURNS[:2]), False))
    used = answer.usage.input_tokens + output
    assert used <= MAX_CONTEXT < used + turn, "one more turn would not fit"


def _rendered(message: dict[str, str]) -> str:
    return f"<|start|>{message['role']}\n{message['content']}<|end|>\n"


def test_truncation_keeps_what_fits_and_refuses_a_turn_that_does_not(client, api):
    ask(client, input=TURNS[:3], truncation="auto")
    assert "Question 0" in prompt_of(api)
    for items in ("word " * 300, [*TURNS[:2], {"role": "user", "content": "word " * 300}]):
        with pytest.raises(openai.APIStatusError) as caught:
            ask(client, input=items, truncation="auto")
        assert caught.value.status_code == 400


def test_items_of_a_turn_are_one_message_of_the_template(client, api):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "How"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": THOUGHT},
        {"type": "message", "id": "m", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "I ask", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": WHERE},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    ]  # fmt: skip
    ask(client, input=items, tools=TOOLS, max_output_tokens=9)
    assert prompt_of(api) == (
        "tools:weather <|start|>user\nHow<|end|>\n"
        '<|start|>assistant\n<think>Hm</think>I ask<tool_call>{"name": "weather", "arguments": '
        '{"city": "Köln"}}</tool_call><|end|>\n'
        "<|start|>tool\nrain(c1)<|end|>\n<|start|>assistant\n"
    )


def test_output_can_be_sent_back_as_input(client, api):
    api.says(THINKING + "I ask." + SHORT_CALL)
    first = ask(client, tools=TOOLS)
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    ask(client, input=[*first.output, result], tools=TOOLS, max_output_tokens=9)
    assert f"rain({call.call_id})" in prompt_of(api)
    assert "<think>Let me see</think>I ask.<tool_call>" in prompt_of(api)


@pytest.mark.parametrize(
    ("kind", "has_grammar"), [("text", False), ("json_object", True), ("json_schema", True)]
)
def test_text_format_holds_the_text_to_a_grammar(client, api, kind, has_grammar):
    wanted = {"type": kind}
    if kind == "json_schema":
        wanted |= {"name": "answer", "schema": SCHEMA, "strict": True}
    answer = ask(client, text={"format": wanted})
    assert (api.generator.requests[0].sampling.grammar is not None) is has_grammar
    assert answer.text.format.type == kind


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"top_logprobs": 21, "include": [LOGPROBS]}, "top_logprobs"),
        ({"truncation": "middle"}, "truncation"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "other"}, "tools": TOOLS}, "tool_choice"),
        ({"input": []}, "input"),
        ({"input": [], "instructions": "Be kind"}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": IMAGE}, "input[0].content[0].type"),
        ({"temperature": 3}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"extra_body": {"instruction": 1}}, "instruction"),
        ({"extra_headers": {"Last-Event-ID": "x"}}, "Last-Event-ID"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **fields)
    assert caught.value.param == param


def test_an_error_in_mid_stream_is_the_last_event(client, api):
    steps = api.generator.script
    api.generator.script = lambda request: [*steps(request)[:1], Overloaded("gone")]
    *_, last = list(ask(client, stream=True))
    assert last.type == "response.failed"
    assert (last.response.status, last.response.error.message) == ("failed", "gone")


def test_an_error_before_the_stream_has_a_status(client, api):
    api.generator.script = lambda request: [Overloaded("no worker is ready")]
    with pytest.raises(openai.InternalServerError):
        ask(client, stream=True)


def test_a_client_that_leaves_ends_the_generation(client, api):
    left = {"endpoint": "/v1/responses", "status": "499"}
    before = api.metric("baton_http_requests_total", **left)
    steps = api.generator.script
    api.generator.script = lambda request: [*steps(request)[:1], Forever()]
    stream = ask(client, stream=True)
    next(iter(stream))
    api.generator.wait_active(1)
    stream.close()
    api.generator.wait_idle()
    assert api.generator.most_active == 1
    api.settle(lambda: api.metric("baton_http_requests_total", **left) == before + 1)


def test_input_tokens_are_counted(client, api):
    asked = {"input": "Say it", "instructions": "Be short", "tools": TOOLS}
    counted = client.responses.input_tokens.count(model=MODEL, **asked)
    assert counted.object == "response.input_tokens"
    assert api.generator.requests == []
    assert counted.input_tokens == ask(client, **asked).usage.input_tokens
    assert client.responses.input_tokens.count(input="x").input_tokens > 0
    for wrong in ({"input": "x", "model": "other"}, {"previous_response_id": "r", "input": "x"}):
        with pytest.raises(openai.APIStatusError):
            client.responses.input_tokens.count(**wrong)
