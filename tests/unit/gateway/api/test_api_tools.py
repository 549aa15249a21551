"""Tool calls and reasoning over HTTP, as the `openai` client's helpers put them together."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from tokenizers import Tokenizer as HfTokenizer

from gateway.text.fill_in_middle import fill_in_middle
from gateway.text.tokenizer import Tokenizer
from protocol.messages import FinishReason
from tests.unit.gateway.api_harness import MODEL, LiveApi, events_of

TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool.function.name }};{% endfor %}
{%- for m in messages %}{{ m.role }}:{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{{- '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}
{%- if thinking is defined %}{{ '<think>' if thinking else '<think></think>' }}{% endif %}
"""
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
CALLS = (
    "<tool_call>\n"
    '{"name": "add", "arguments": {"a": 1, "b": "}"}}\n'
    "</tool_call>\n"
    '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
)
SAID = f"<think>\nHm.\n</think>\n\nI add. \n{CALLS}"
SPECIAL = ["<tool_call>", "</tool_call>"]
FIM = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]


@pytest.fixture(scope="module")
def thinker(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveApi]:
    """A model that thinks and calls tools, and whose call markers are special tokens."""
    folder = Path(shutil.copytree(checkpoint, tmp_path_factory.mktemp("thinker") / "model"))
    raw = HfTokenizer.from_file(str(folder / "tokenizer.json"))
    raw.add_special_tokens([*SPECIAL, *FIM])
    raw.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(folder)
    with LiveApi(folder, tokenizer) as live:
        yield live
        live.generator.wait_idle()
    tokenizer.close()


@pytest.fixture
def tools_api(thinker: LiveApi) -> LiveApi:
    thinker.reset()
    thinker.says(SAID)
    return thinker


@pytest.fixture
def client(tools_api: LiveApi) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tools_api.url}/v1", api_key="none", max_retries=0) as client:
        yield client


QUESTION = [{"role": "user", "content": "1 + 1?"}]


def test_a_whole_message(client):
    choice = client.chat.completions.create(model=MODEL, messages=QUESTION, tools=[TOOL]).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I add."
    assert choice.message.reasoning_content == "Hm."
    calls = choice.message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == [{"a": 1, "b": "}"}, {}]
    assert {call.function.name for call in calls} == {"add"}
    assert len({call.id for call in calls}) == 2


def test_a_streamed_message_adds_up_to_the_whole(client):
    with client.chat.completions.stream(model=MODEL, messages=QUESTION, tools=[TOOL]) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, tools=[TOOL]).choices[0]
    assert streamed.finish_reason == whole.finish_reason
    assert streamed.message.content == whole.message.content
    assert streamed.message.reasoning_content == whole.message.reasoning_content
    assert [call.function.arguments for call in streamed.message.tool_calls] == [
        call.function.arguments for call in whole.message.tool_calls
    ]


def test_thoughts_that_are_not_wanted_are_left_out(tools_api):
    plain = tools_api.chat(include_reasoning=True).json()["choices"][0]["message"]
    assert plain["reasoning_content"] == "Hm."
    tools_api.says(SAID)
    message = tools_api.chat(include_reasoning=False).json()["choices"][0]["message"]
    assert message == {
        name: value for name, value in plain.items() if not name.startswith("reasoning")
    }
    events = events_of(tools_api.chat(include_reasoning=False, stream=True).text)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert not {"reasoning", "reasoning_content"} & {name for delta in deltas for name in delta}
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]


@pytest.mark.parametrize(
    ("fields", "admits_calls"),
    [
        ({"response_format": {"type": "json_object"}}, True),
        ({"structured_outputs": {"choice": ["a", "b"]}}, True),
        ({"response_format": {"type": "json_object"}, "tool_choice": "none"}, False),
    ],
)
def test_an_answer_of_some_form_may_be_calls_instead(tools_api, fields, admits_calls):
    answer = tools_api.chat(tools=[TOOL], **fields)
    assert answer.status_code == 200, answer.text
    grammar = tools_api.generator.requests[-1].sampling.grammar
    assert ("call_0" in grammar) is admits_calls
    if admits_calls:
        choice = answer.json()["choices"][0]
        assert choice["message"]["reasoning_content"] == "Hm.", "the grammar lets it think"
        assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_thoughts_before_calls_stay_apart_whatever_the_form_of_a_text(tools_api, choice):
    wanted = {"response_format": {"type": "json_object"}, "tool_choice": choice}
    message = tools_api.chat(tools=[TOOL], **wanted).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "Hm."
    assert "<think>" not in str(message["content"])


@pytest.mark.parametrize("choice", ["required", "any"])
def test_arguments_of_required_calls_come_in_pieces(tools_api, choice):
    answer = tools_api.chat(tools=[TOOL], tool_choice=choice, stream=True)
    events = events_of(answer.text)
    deltas = [event["choices"][0]["delta"] for event in events]
    pieces = [call for delta in deltas for call in delta.get("tool_calls", ())]
    begins = [piece for piece in pieces if "id" in piece]
    assert [(each["index"], each["function"]["name"]) for each in begins] == [
        (0, "add"),
        (1, "add"),
    ]
    assert len(pieces) > 10
    assert all(set(piece) == {"index", "function"} for piece in pieces if piece not in begins)


def test_choices_are_parsed_apart(client):
    choices = client.chat.completions.create(
        model=MODEL, messages=QUESTION, tools=[TOOL], n=3
    ).choices
    assert [len(choice.message.tool_calls) for choice in choices] == [2, 2, 2]
    assert len({call.id for choice in choices for call in choice.message.tool_calls}) == 6


def test_calls_alone_have_no_content(tools_api, client):
    tools_api.says(CALLS)
    choice = client.chat.completions.create(
        model=MODEL, messages=QUESTION, tools=[TOOL], parallel_tool_calls=False
    ).choices[0]
    assert choice.message.content is None
    assert len(choice.message.tool_calls) == 1


def test_without_tools_the_text_is_content(tools_api):
    message = tools_api.chat().json()["choices"][0]["message"]
    assert "tool_calls" not in message
    assert '{"name": "add"' in message["content"]


def test_a_text_cut_short_says_so(tools_api):
    tools_api.says(CALLS, FinishReason.LENGTH)
    choice = tools_api.chat(tools=[TOOL]).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"]


@pytest.mark.parametrize(
    ("thinking", "said", "reasoning", "content"),
    [
        (True, "Hm.\n</think>Yes", "Hm.", "Yes"),
        (False, "Yes", None, "Yes"),
        (None, "<think>Hm.</think>Yes", "Hm.", "Yes"),
    ],
)
def test_the_prompt_says_whether_reasoning_is_open(tools_api, thinking, said, reasoning, content):
    tools_api.says(said)
    variables = {} if thinking is None else {"thinking": thinking}
    answer = tools_api.chat(chat_template_kwargs=variables)
    message = answer.json()["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


def test_earlier_calls_and_results_reach_the_template(tools_api):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        *QUESTION,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    tools_api.chat(messages=messages, tools=[TOOL])
    prompt = tools_api.tokenizer.decode(tools_api.generator.requests[-1].token_ids, False)
    assert prompt == (
        "add;user:1 + 1?<|end|>"
        'assistant:<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|end|>'
        "tool:2<|end|>assistant:"
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "no"}}},
            "tool_choice",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "structured_outputs": {"regex": "a"}}, "tool_choice"),
        ({"tools": [TOOL], "structured_outputs": {"grammar": "start: x\nx: /a/"}}, "tool_choice"),
        ({"documents": [{}]}, "documents"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tools_api, fields, param):
    answer = tools_api.chat(**fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_schema_that_no_grammar_can_hold_is_refused(tools_api):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}
    answer = tools_api.chat(tools=[tool], tool_choice="required")
    assert (answer.status_code, answer.json()["error"]["param"]) == (
        400,
        "tools[0].function.parameters",
    )


def test_a_suffix_is_filled_in_before_where_the_model_has_the_tokens(tools_api):
    tools_api.complete("Hello", suffix=" there")
    prompt = tools_api.tokenizer.decode(tools_api.generator.requests[-1].token_ids, False)
    assert prompt == "<|fim_prefix|>Hello<|fim_suffix|> there<|fim_middle|>"
    assert fill_in_middle(tools_api.tokenizer, "Hello", " there") == (
        tools_api.generator.requests[-1].token_ids
    )


def test_reasoning_is_counted_on_every_api(tools_api):
    """Reasoning counts with its markers, the rest of the answer does not."""
    thoughts = "<think>\nHm, five.\n</think>"
    num_tokens = len(tools_api.tokenizer.encode(thoughts, False))
    tools_api.says(f"{thoughts}\n\nIt is five.")
    usage = tools_api.chat().json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": num_tokens}
    assert usage["completion_tokens"] > num_tokens
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = events_of(tools_api.chat(**options).text)
    assert last["usage"] == usage
    answer = tools_api.post("/v1/responses", {"model": MODEL, "input": "5?"}).json()
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": num_tokens}
    two = tools_api.chat(n=2).json()["usage"]
    assert two["completion_tokens_details"] == {"reasoning_tokens": 2 * num_tokens}
    assert "completion_tokens_details" not in tools_api.complete().json()["usage"]


def test_stop_strings_count_in_the_answer_alone(tools_api):
    tools_api.says("<think>I say Stop.</think>Go. Stop. Go.")
    for stream in (False, True):
        answer = tools_api.chat(stop=["Stop"], stream=stream)
        choices = [answer.json()] if not stream else events_of(answer.text)
        parts = [
            each["choices"][0].get("message") or each["choices"][0]["delta"] for each in choices
        ]
        assert "".join(part.get("reasoning", "") for part in parts) == "I say Stop."
        assert "".join(part.get("content") or "" for part in parts) == "Go. "
        assert choices[-1]["choices"][0]["stop_reason"] == "Stop"


def test_stop_strings_do_not_count_in_calls(tools_api):
    fields = {"tools": [TOOL], "stop": ['"b"', "name", "</tool_call>"], "logprobs": True}
    for stream in (False, True):
        answer = tools_api.chat(stream=stream, **fields)
        choices = [answer.json()] if not stream else events_of(answer.text)
        assert choices[-1]["choices"][0]["finish_reason"] == "tool_calls"
        parts = [
            each["choices"][0].get("message") or each["choices"][0]["delta"] for each in choices
        ]
        calls = [call["function"] for part in parts for call in part.get("tool_calls") or ()]
        arguments = "".join(call["arguments"] for call in calls)
        assert arguments == '{"a": 1, "b": "}"}{}'
        assert "".join(part.get("content") or "" for part in parts) == "I add."
    tools_api.says(f"I name it.{CALLS}")
    choice = tools_api.chat(**fields).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "name")
    assert choice["message"]["content"] == "I "
    assert not choice["message"].get("tool_calls")


def test_a_form_applies_to_the_answer_behind_the_reasoning(tools_api):
    """The prompt opens the reasoning, so the form begins where it ends."""
    tools_api.says('Hm. {"a": 0}</think>{"a": 1}')
    fields = {"response_format": {"type": "json_object"}}
    message = tools_api.chat(chat_template_kwargs={"thinking": True}, **fields)
    assert message.json()["choices"][0]["message"]["reasoning"] == 'Hm. {"a": 0}'
    assert message.json()["choices"][0]["message"]["content"] == '{"a": 1}'
    grammar = str(tools_api.generator.requests[-1].sampling.grammar)
    assert "\nstart: thought gap constrained_answer\n" in grammar
    tools_api.says('{"a": "<think>"}')
    message = tools_api.chat(chat_template_kwargs={"thinking": False}, **fields)
    assert message.json()["choices"][0]["message"]["content"] == '{"a": "<think>"}'
    assert "thought" not in str(tools_api.generator.requests[-1].sampling.grammar)


def test_a_stream_says_only_what_is_new(tools_api):
    """No chunk for hidden tokens of markup, and no empty content before calls."""
    tools_api.says(f"<think>Hm.</think>{CALLS}")
    deltas = [
        each["choices"][0] for each in events_of(tools_api.chat(tools=[TOOL], stream=True).text)
    ]
    assert deltas[0]["delta"]["role"] == "assistant"
    assert all("content" not in each["delta"] for each in deltas)
    *before, last = deltas
    assert all(each["delta"] for each in before)
    assert last["finish_reason"] == "tool_calls"
    told = {"logprobs": True, "stream": True, "return_token_ids": True}
    events = events_of(tools_api.chat(tools=[TOOL], **told).text)
    tokens = [id_ for each in events for id_ in each["choices"][0]["token_ids"]]
    assert len(tokens) == tools_api.chat(tools=[TOOL]).json()["usage"]["completion_tokens"]
    choice = events_of(tools_api.chat(tools=[TOOL], tool_choice="none", stream=True).text)[0]
    assert choice["choices"][0]["delta"]["content"] == ""


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"messages": []}, "messages"),
        (
            "/v1/responses",
            {
                "input": [
                    {
                        "type": "function_call",
                        "call_id": "c",
                        "name": "f",
                        "arguments": '{"a":' + "[" * 300 + "]" * 300 + "}",
                    }
                ]
            },
            "input",
        ),
        (
            "/v1/responses",
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}}},
            "text.format.schema",
        ),
        (
            "/v1/chat/completions",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"type": "x"}},
                }
            },
            "response_format.json_schema.schema",
        ),
    ],
)
def test_errors_name_the_caller_s_own_field(tools_api, path, fields, param):
    own = {"messages": QUESTION} if "chat" in path else {"input": "5?"}
    answer = tools_api.post(path, {"model": MODEL, **own, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert f"'{param}'" in error["message"]


DENYING = {"type": "json_schema", "name": "a", "schema": {"not": {"const": 1}}}


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/v1/chat/completions", {"reasoning_effort": "low"}, "reasoning_effort"),
        ("/v1/responses", {"reasoning": {"effort": "low"}}, "reasoning.effort"),
        (
            "/v1/responses",
            {"text": {"format": DENYING}},
            "text.format.schema/not",
        ),
    ],
)  # fmt: skip
def test_what_is_ignored_has_the_caller_s_own_name(tools_api, path, fields, named):
    own = {"messages": QUESTION} if "chat" in path else {"input": "5?"}
    answer = tools_api.post(path, {"model": MODEL, **own, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-baton-ignored"] == named
