"""Conversations of several turns, as applications hold them: what a client's own types made of an
answer goes back with the next question, as it is or dumped, and loses nothing on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from anthropic import beta_tool
from pydantic import BaseModel

from gateway.text.tokenizer import Tokenizer
from protocol.messages import FinishReason
from router.requests.interface import GenerationRequest
from tests.unit.gateway.api_clients import SCHEMA, THINKING
from tests.unit.gateway.api_harness import MODEL, TIMEOUT_S, LiveApi, Step, token_steps

ASK = [{"role": "user", "content": "Say it"}]
PLACE = '{"city":"Rome"}'
CALL = f'<tool_call>\n{{"name":"weather","arguments":{PLACE}}}\n</tool_call>'
ASKED_BEFORE = "<|start|>user\nSay it<|end|>\n<|start|>assistant\n"
CALLED_BEFORE = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call><|end|>\n'


class Place(BaseModel):
    """What answers are parsed into, and the arguments of the tool."""

    city: str


@pytest.fixture(scope="module")
def running_api(tools_checkpoint: Path, tools_tokenizer: Tokenizer) -> Iterator[LiveApi]:
    with LiveApi(tools_checkpoint, tools_tokenizer, max_context=1000) as live:
        yield live


@pytest.fixture
def client(api: LiveApi) -> Iterator[openai.OpenAI]:
    url = f"{api.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=TIMEOUT_S) as each:
        yield each


@pytest.fixture
def claude(api: LiveApi) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=api.url, api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as each:
        yield each


def says_in_turn(api: LiveApi, *texts: str) -> None:
    """Makes the n-th generation from now on give the n-th text."""
    left = list(texts)

    def script(request: GenerationRequest) -> list[Step]:
        ids = api.tokenizer.encode(left.pop(0), add_special_tokens=False)
        return token_steps(request, ids, FinishReason.STOP, api.tokenizer)

    api.generator.script = script


def prompt_of(api: LiveApi) -> str:
    return api.tokenizer.decode(api.generator.requests[-1].token_ids, False)


def as_it_is(answer: Any) -> Any:
    return answer


def dumped(answer: BaseModel) -> dict[str, Any]:
    """With every field of the client's type, most of them null."""
    return answer.model_dump(by_alias=True, exclude=getattr(answer, "__api_exclude__", None))


either_way = pytest.mark.parametrize("sent", [as_it_is, dumped], ids=["as it is", "dumped"])
Sent = Callable[[Any], Any]


def chat_created(client: openai.OpenAI, **asked: Any) -> Any:
    return client.chat.completions.create(**asked)


def chat_parsed(client: openai.OpenAI, **asked: Any) -> Any:
    return client.chat.completions.parse(**asked)


def chat_streamed(client: openai.OpenAI, **asked: Any) -> Any:
    with client.chat.completions.stream(**asked) as stream:
        return stream.get_final_completion()


@either_way
@pytest.mark.parametrize("ask", [chat_created, chat_parsed, chat_streamed])
def test_a_chat_with_thoughts_and_a_call(
    client: openai.OpenAI, api: LiveApi, ask: Callable[..., Any], sent: Sent
) -> None:
    tool = openai.pydantic_function_tool(Place, name="weather")
    says_in_turn(api, f"{THINKING}I ask.{CALL}", "It rains.")
    asked = {"model": MODEL, "tools": [tool], "max_completion_tokens": 200}
    message = ask(client, messages=ASK, **asked).choices[0].message
    [call] = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    messages = [*ASK, sent(message), result]
    assert ask(client, messages=messages, **asked).choices[0].message.content == "It rains."
    assert prompt_of(api) == (
        f"tools:weather {ASKED_BEFORE}<think>Let me see</think>I ask.{CALLED_BEFORE}"
        f"<|start|>tool\nrain({call.id})<|end|>\n<|start|>assistant\n"
    )


@either_way
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_a_parsed_answer_of_a_chat(client: openai.OpenAI, api: LiveApi, sent: Sent) -> None:
    says_in_turn(api, PLACE, PLACE)
    asked = {"model": MODEL, "response_format": Place, "max_completion_tokens": 30}
    message = client.chat.completions.parse(messages=ASK, **asked).choices[0].message
    assert message.parsed == Place(city="Rome")
    again = [*ASK, sent(message), *ASK]
    assert client.chat.completions.parse(messages=again, **asked).choices[0].message.parsed
    assert prompt_of(api) == f"{ASKED_BEFORE}{PLACE}<|end|>\n{ASKED_BEFORE}"


def response_created(client: openai.OpenAI, **asked: Any) -> Any:
    return client.responses.create(**asked)


def response_parsed(client: openai.OpenAI, **asked: Any) -> Any:
    return client.responses.parse(**asked)


def response_streamed(client: openai.OpenAI, **asked: Any) -> Any:
    with client.responses.stream(**asked) as stream:
        return stream.get_final_response()


@either_way
@pytest.mark.parametrize("ask", [response_created, response_parsed, response_streamed])
def test_a_response_with_thoughts_and_a_call(
    client: openai.OpenAI, api: LiveApi, ask: Callable[..., Any], sent: Sent
) -> None:
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
    says_in_turn(api, f"{THINKING}I ask.{CALL}", "It rains.")
    asked = {"model": MODEL, "tools": [tool], "max_output_tokens": 200}
    output = ask(client, input=ASK, **asked).output
    call = output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    items = [*ASK, *[sent(each) for each in output], result]
    assert ask(client, input=items, **asked).output_text == "It rains."
    assert prompt_of(api) == (
        f"tools:weather {ASKED_BEFORE}<think>Let me see</think>I ask.{CALLED_BEFORE}"
        f"<|start|>tool\nrain({call.call_id})<|end|>\n<|start|>assistant\n"
    )


def test_a_parsed_response(client: openai.OpenAI, api: LiveApi) -> None:
    says_in_turn(api, PLACE, PLACE)
    asked = {"model": MODEL, "text_format": Place, "max_output_tokens": 30}
    first = client.responses.parse(input=ASK, **asked)
    assert first.output_parsed == Place(city="Rome")
    again = client.responses.parse(input=[*ASK, *first.output, *ASK], **asked)
    assert again.output_parsed == first.output_parsed
    assert prompt_of(api) == f"{ASKED_BEFORE}{PLACE}<|end|>\n{ASKED_BEFORE}"


def message_created(claude: anthropic.Anthropic, **asked: Any) -> Any:
    return claude.messages.create(**asked)


def message_streamed(claude: anthropic.Anthropic, **asked: Any) -> Any:
    with claude.messages.stream(**asked) as stream:
        return stream.get_final_message()


def message_of_beta(claude: anthropic.Anthropic, **asked: Any) -> Any:
    return claude.beta.messages.create(betas=["interleaved-thinking-2025-05-14"], **asked)


@either_way
@pytest.mark.parametrize("ask", [message_created, message_streamed, message_of_beta])
def test_a_message_with_thoughts_and_a_call(
    claude: anthropic.Anthropic, api: LiveApi, ask: Callable[..., Any], sent: Sent
) -> None:
    tool = {"name": "weather", "input_schema": SCHEMA}
    says_in_turn(api, f"{THINKING}I ask.{CALL}", "It rains.")
    asked = {"model": MODEL, "tools": [tool], "max_tokens": 200}
    content = ask(claude, messages=ASK, **asked).content
    call = content[-1]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    messages = [
        *ASK,
        {"role": "assistant", "content": [sent(each) for each in content]},
        {"role": "user", "content": [result]},
    ]
    assert ask(claude, messages=messages, **asked).content[0].text == "It rains."
    assert prompt_of(api) == (
        f"tools:weather {ASKED_BEFORE}<think>Let me see</think>I ask.{CALLED_BEFORE}"
        f"<|start|>tool\nrain({call.id})<|end|>\n<|start|>assistant\n"
    )


def test_a_parsed_message(claude: anthropic.Anthropic, api: LiveApi) -> None:
    says_in_turn(api, PLACE)
    answer = claude.messages.parse(model=MODEL, messages=ASK, max_tokens=30, output_format=Place)
    assert answer.parsed_output == Place(city="Rome")
    assert '"city"' in str(api.generator.requests[0].sampling.grammar)


def test_anthropics_tool_runner_runs_the_loop(claude: anthropic.Anthropic, api: LiveApi) -> None:
    @beta_tool
    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: Which.
        """
        return f"rain in {city}"

    says_in_turn(api, CALL, "It rains.")
    runner = claude.beta.messages.tool_runner(
        model=MODEL, messages=ASK, max_tokens=200, tools=[weather]
    )
    assert runner.until_done().content[0].text == "It rains."
    assert "<|start|>tool\nrain in Rome(" in prompt_of(api)


def test_what_the_system_says_between_turns(claude: anthropic.Anthropic, api: LiveApi) -> None:
    blocks = [{"type": "text", "text": "Be short"}]
    for content in ("Be short", blocks):
        messages = [*ASK, {"role": "system", "content": content}, *ASK]
        claude.messages.create(model=MODEL, messages=messages, max_tokens=9)
        assert prompt_of(api) == (
            "<|start|>user\nSay it<|end|>\n<|start|>system\nBe short<|end|>\n" + ASKED_BEFORE
        )


def test_vllms_name_for_thoughts(api: LiveApi) -> None:
    says_in_turn(api, f"{THINKING}Yes", "")
    message = api.chat(max_tokens=200).json()["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Let me see"
    del message["reasoning_content"]
    api.chat(messages=[*ASK, message, *ASK], max_tokens=9)
    assert "<think>Let me see</think>Yes<|end|>" in prompt_of(api)


def test_every_api_lets_an_answer_of_some_form_be_a_call_instead(
    client: openai.OpenAI, claude: anthropic.Anthropic, api: LiveApi
) -> None:
    function = {"name": "weather", "parameters": SCHEMA}
    asked: dict[str, Any] = {"model": MODEL}
    says_in_turn(api, CALL, CALL, CALL)
    chat = client.chat.completions.parse(
        messages=ASK, tools=[{"type": "function", "function": function | {"strict": True}}],
        response_format=Place, **asked,
    )  # fmt: skip
    assert chat.choices[0].finish_reason == "tool_calls"
    response = client.responses.parse(
        input=ASK, tools=[{"type": "function", **function}], text_format=Place, **asked
    )
    assert [item.type for item in response.output] == ["function_call"]
    form = {"type": "json_schema", "schema": Place.model_json_schema()}
    message = claude.messages.create(
        messages=ASK, tools=[{"name": "weather", "input_schema": SCHEMA}], max_tokens=99,
        output_config={"format": form}, **asked,
    )  # fmt: skip
    assert message.stop_reason == "tool_use"
    for request in api.generator.requests:
        assert "answer: %json" in str(request.sampling.grammar)
        assert "call_0: %json" in str(request.sampling.grammar)


@pytest.mark.parametrize(("many", "num_calls"), [(True, 2), (False, 1)])
def test_every_api_can_ask_for_one_call_at_most(
    client: openai.OpenAI, claude: anthropic.Anthropic, api: LiveApi, many: bool, num_calls: int
) -> None:
    function = {"name": "weather", "parameters": SCHEMA}
    both = f"{CALL}\n{CALL}"
    says_in_turn(api, both, both, both)
    one: dict[str, Any] = {"model": MODEL, "parallel_tool_calls": many}
    chat = client.chat.completions.create(
        messages=ASK, tools=[{"type": "function", "function": function}], **one
    )
    assert len(chat.choices[0].message.tool_calls) == num_calls
    response = client.responses.create(input=ASK, tools=[{"type": "function", **function}], **one)
    assert len(response.output) == num_calls
    message = claude.messages.create(
        model=MODEL,
        messages=ASK,
        tools=[{"name": "weather", "input_schema": SCHEMA}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": not many},
        max_tokens=300,
    )
    assert len(message.content) == num_calls
