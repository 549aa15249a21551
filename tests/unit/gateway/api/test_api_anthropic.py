"""Anthropic's own client, unchanged, against `/v1/messages`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anthropic
import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from gateway.api.context import ApiLimits
from gateway.text.tokenizer import Tokenizer
from protocol.errors import Overloaded
from protocol.messages import FinishReason
from tests.unit.gateway.api_clients import ARGUMENTS, CALL, SCHEMA, SHORT_CALL, THINKING
from tests.unit.gateway.api_harness import MODEL, TIMEOUT_S, Forever, LiveApi, Pause

ASK = [{"role": "user", "content": "Say it"}]
SYSTEM = [{"type": "text", "text": "S"}]
TOOLS = [{"name": "weather", "description": "The weather", "input_schema": SCHEMA}]
THOUGHT = [{"type": "thinking", "thinking": "x"}]
HOW = [{"type": "text", "text": "How", "cache_control": {"type": "ephemeral"}}]
REMOTE_SCHEMA = {"type": "json_schema", "schema": {"$ref": "http://x/y"}}
SAYING = "Hello wörld 你好 😀"
EVENT = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture(scope="module")
def running_api(tools_checkpoint: Path, tools_tokenizer: Tokenizer) -> Iterator[LiveApi]:
    with LiveApi(tools_checkpoint, tools_tokenizer, ApiLimits(keepalive_s=0.05)) as live:
        yield live


@pytest.fixture
def client(api: LiveApi) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=api.url, api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as each:
        yield each


def ask(client: anthropic.Anthropic, **fields) -> Message:
    fields = {"model": MODEL, "max_tokens": 150, "messages": ASK, **fields}
    return client.messages.create(**fields)


def streamed(client: anthropic.Anthropic, **fields) -> tuple[list, Message]:
    """Every event, and the message that the client makes of them."""
    fields = {"model": MODEL, "max_tokens": 150, "messages": ASK, **fields}
    with client.messages.stream(**fields) as stream:
        events = list(stream)
        return events, stream.get_final_message()


def prompt_of(api: LiveApi, number: int = -1) -> str:
    return api.tokenizer.decode(api.generator.requests[number].token_ids, False)


def test_text(client, api):
    api.says(SAYING)
    answer = ask(client, system="Be short", metadata={"user_id": "u"})
    assert [(block.type, block.text) for block in answer.content] == [("text", SAYING)]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.id.startswith("msg_")
    request = api.generator.requests[0]
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == len(
        request.token_ids
    )
    assert answer.usage.cache_read_input_tokens == 2
    assert answer.usage.output_tokens == len(api.tokenizer.encode(SAYING, False)) + 1
    assert request.sampling.max_tokens == 150
    assert prompt_of(api) == (
        "<|start|>system\nBe short<|end|>\n<|start|>user\nSay it<|end|>\n<|start|>assistant\n"
    )


def test_stop_reasons(client, api):
    api.says("one two three")
    stopped = ask(client, stop_sequences=["two", "x"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "two")
    assert stopped.content[0].text == "one "
    api.says("one two three", FinishReason.LENGTH)
    assert ask(client).stop_reason == "max_tokens"


def test_thoughts_and_calls(client, api):
    api.says(THINKING + "I ask." + CALL)
    answer = ask(client, tools=TOOLS)
    thinking, text, call = answer.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Let me see")
    assert text.text == "I ask."
    assert (call.type, call.name, call.input) == ("tool_use", "weather", ARGUMENTS)
    assert answer.stop_reason == "tool_use"
    assert prompt_of(api).startswith("tools:weather ")


def test_a_stream_says_the_same(client, api):
    api.says(THINKING + "I ask." + CALL)
    whole = ask(client, tools=TOOLS)
    events, message = streamed(client, tools=TOOLS)
    assert [block.model_dump() for block in message.content] == [
        block.model_dump() | ({"id": message.content[2].id} if block.type == "tool_use" else {})
        for block in whole.content
    ]
    assert message.stop_reason == whole.stop_reason
    assert message.usage.output_tokens == whole.usage.output_tokens
    kinds = [event.type for event in events if event.type.startswith(("message", "content"))]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    assert len(kinds) > 20
    assert [each.is_resumable for each in api.generator.requests] == [False, True]


def test_every_event_is_one_of_anthropics_and_no_more(api):
    api.says(THINKING + SHORT_CALL + SHORT_CALL)
    body = {"model": MODEL, "max_tokens": 150, "messages": ASK, "tools": TOOLS, "stream": True}
    text = api.post("/v1/messages", body).text
    names = []
    for frame in text.strip().split("\n\n"):
        _, name, data = frame.split("\n")
        names.append(name.removeprefix("event: "))
        if names[-1] != "ping":
            event = EVENT.validate_json(data.removeprefix("data: "), strict=True)
            assert event.type == names[-1]
            assert set(event.model_dump(exclude_unset=True)) == set(type(event).model_fields)
    begin = names.index("message_start")
    assert set(names[:begin]) <= {"ping"}  # on a slow machine the beginning is silent
    assert names[begin + 1] == "ping"
    assert text.count('"content_block":{"type":"tool_use"') == 2


def test_a_turn_with_tools_reaches_the_template(client, api):
    messages = [
        {"role": "user", "content": HOW},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": ""},
                {"type": "text", "text": "I ask"},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Köln"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "rain", "is_error": True},
                {"type": "text", "text": "And?"},
            ],
        },
    ]  # fmt: skip
    ask(
        client, max_tokens=9, messages=messages, tools=TOOLS, system=[{"type": "text", "text": "S"}]
    )
    assert prompt_of(api) == (
        "tools:weather <|start|>system\nS<|end|>\n<|start|>user\nHow<|end|>\n"
        '<|start|>assistant\n<think>Hm</think>I ask<tool_call>{"name": "weather", "arguments": '
        '{"city": "Köln"}}</tool_call><|end|>\n'
        "<|start|>tool\nError: rain(c1)<|end|>\n<|start|>user\nAnd?<|end|>\n<|start|>assistant\n"
    )


def test_the_answer_goes_on_in_the_assistants_last_message(client, api):
    ask(client, messages=[*ASK, {"role": "assistant", "content": "The answer is ("}])
    assert prompt_of(api).endswith("<|start|>assistant\nThe answer is (")


def test_thinking_switches_the_template(client, api):
    ask(client, thinking={"type": "disabled"})
    assert prompt_of(api).endswith("assistant\n<think></think>")
    ask(client, thinking={"type": "enabled", "budget_tokens": 1024})
    assert prompt_of(api).endswith("assistant\n")


def test_a_schema_is_kept_to(client, api):
    ask(client, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    ask(client)
    grammars = [each.sampling.grammar for each in api.generator.requests]
    assert [grammar and '"city"' in grammar for grammar in grammars] == [True, None]


def test_count_tokens(client, api):
    counted = client.messages.count_tokens(model=MODEL, messages=ASK, tools=TOOLS, system="Be")
    answer = ask(client, tools=TOOLS, system="Be")
    assert counted.input_tokens == len(api.generator.requests[0].token_ids)
    assert answer.usage.input_tokens + 2 == counted.input_tokens


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "'messages'"),
        ({"messages": [{"role": "developer", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "system", "content": THOUGHT}]}, "system"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"messages": [{"role": "user", "content": THOUGHT}]}, "user"),
        ({"extra_body": {"temperature": 1.5}}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 3}}, "budget_tokens"),
        ({"tool_choice": {"type": "tool", "name": "other"}, "tools": TOOLS}, "other"),
        ({"tool_choice": {"type": "tool"}, "tools": TOOLS}, "tool_choice.name"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"output_config": {"format": REMOTE_SCHEMA}}, "output_config.format.schema"),
        ({"extra_headers": {"anthropic-version": "2020-01-01"}}, "anthropic-version"),
        ({"extra_body": {"stop_sequence_": 1}}, "stop_sequence_"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(client, fields, named):
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client, **fields)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert named in caught.value.body["error"]["message"]
    own_id = caught.value.response.headers["x-baton-request-id"]
    assert caught.value.body["request_id"] == caught.value.request_id == own_id


def test_errors_are_the_clients_own_types(client, api):
    with pytest.raises(anthropic.NotFoundError) as missing:
        ask(client, model="claude")
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        ask(client, messages=[{"role": "user", "content": "word " * 300}])
    api.generator.script = lambda request: [Overloaded("no worker is ready")]
    with pytest.raises(anthropic.InternalServerError) as overloaded:
        ask(client)
    assert overloaded.value.body["error"]["type"] == "overloaded_error"
    wrong = api.http.get("/v1/messages")
    assert (wrong.status_code, wrong.json()["type"]) == (405, "error")


def test_an_error_in_mid_stream_is_an_error_event(client, api):
    steps = api.generator.script
    api.generator.script = lambda request: [*steps(request)[:1], Overloaded("gone")]
    with pytest.raises(anthropic.APIStatusError, match="gone"):
        streamed(client)


def test_pings_fill_a_silence_and_a_client_that_leaves_ends_the_generation(api):
    usual, pause = api.generator.script, Pause()
    api.generator.script = lambda request: [pause, *list(usual(request))[:1], Forever()]
    body = {"model": MODEL, "max_tokens": 9, "messages": ASK, "stream": True}
    with api.http.stream("POST", "/v1/messages", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: ping"
        pause.end()
        assert "event: message_start" in lines
    api.generator.wait_idle()


def test_timing_is_on_the_answer_and_on_the_last_event(api):
    body = {"model": MODEL, "max_tokens": 9, "messages": ASK}
    header = {"x-baton-timing": "1"}
    assert api.post("/v1/messages", body, **header).json()["baton"] == {"choices": []}
    text = api.post("/v1/messages", body | {"stream": True}, **header).text
    assert text.endswith('data: {"type":"message_stop","baton":{"choices":[]}}\n\n')


def test_the_answer_has_anthropics_fields_and_no_more(api):
    answer = api.post("/v1/messages", {"model": MODEL, "max_tokens": 9, "messages": ASK})
    assert isinstance(answer, httpx.Response)
    Message.model_validate(answer.json(), strict=True)
    assert set(answer.json()) <= set(Message.model_fields)


BILLING = "x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli; cch={};"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (lambda line: f"{line}\nYou are", "You are"),
        (lambda line: [{"type": "text", "text": line}, *SYSTEM], SYSTEM),
        (lambda line: [{"type": "text", "text": f"{line}\nS"}], SYSTEM),
    ],
)
def test_a_line_that_changes_with_every_request_is_no_part_of_the_prompt(client, api, given, meant):
    for number in ("1a2b3", "c4d5e"):
        ask(client, system=given(BILLING.format(number)))
    ask(client, system=meant)
    first, second, plain = (prompt_of(api, number) for number in range(3))
    assert first == second == plain
    counted = [
        client.messages.count_tokens(model=MODEL, messages=ASK, system=system).input_tokens
        for system in (given(BILLING.format("f")), meant)
    ]
    assert counted[0] == counted[1]


@pytest.mark.parametrize("system", [BILLING, [{"type": "text", "text": BILLING}]])
def test_a_system_prompt_of_that_line_alone_is_none(client, api, system):
    ask(client, system=system)
    ask(client)
    assert prompt_of(api, 0) == prompt_of(api, 1)


def test_that_line_elsewhere_stays(client, api):
    ask(client, system=f"S\n{BILLING}", max_tokens=20)
    assert BILLING in prompt_of(api)
