"""Tool calls and reasoning over HTTP, as the `openai` client's helpers put them together."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from tokenizers import Tokenizer as HfTokenizer

from protocol.messages import FinishReason
from router.text.fill_in_middle import fill_in_middle
from router.text.tokenizer import Tokenizer
from tests.unit.router.api_harness import MODEL, LiveApi, events_of

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


def test_arguments_come_in_pieces(tools_api):
    events = events_of(tools_api.chat(tools=[TOOL], stream=True).text)
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
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"tools": [TOOL], "structured_outputs": {"regex": "a"}}, "tool_choice"),
        ({"tools": [TOOL], "structured_outputs": {"grammar": "start: x\nx: /a/"}}, "tool_choice"),
        ({"documents": [{}]}, "documents"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "1"}}],
                    }
                ]
            },
            "messages[0].tool_calls",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(tools_api, fields, param):
    answer = tools_api.chat(**fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_schema_that_no_grammar_can_hold_is_refused(tools_api):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}
    answer = tools_api.chat(tools=[tool], tool_choice="required")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


def test_a_suffix_is_filled_in_before_where_the_model_has_the_tokens(tools_api):
    tools_api.complete("Hello", suffix=" there")
    prompt = tools_api.tokenizer.decode(tools_api.generator.requests[-1].token_ids, False)
    assert prompt == "<|fim_prefix|>Hello<|fim_suffix|> there<|fim_middle|>"
    assert fill_in_middle(tools_api.tokenizer, "Hello", " there") == (
        tools_api.generator.requests[-1].token_ids
    )
