"""Every parameter of `/v1/responses` and `/v1/messages` alone, sent to the demo model: what it
changes in the answer.

OpenAI's and Anthropic's own types read each answer and event. A field without a test here fails
`test_every_field_is_shown`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gateway.api.anthropic.request import MessagesRequest
from gateway.api.generation_fields import SamplingFields
from gateway.api.openai_responses.request import LOGPROBS, ResponsesRequest
from tests.http_client import HTTP
from tests.integration.fleets import running_fleet
from tests.integration.reference import DEMO_MODEL
from tests.integration.shown_effects import Check, Shown

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
NUM_TOKENS = 16
QUESTION = "What is a lambda?"
ASKED: dict[str, dict[str, Any]] = {
    RESPONSES: {"input": QUESTION, "max_output_tokens": NUM_TOKENS},
    MESSAGES: {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": NUM_TOKENS},
}
EVENTS = {RESPONSES: TypeAdapter(ResponseStreamEvent), MESSAGES: TypeAdapter(RawMessageStreamEvent)}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TURNS = [
    {"role": role, "content": f"{role} {number} " + "word " * 100}
    for number in range(40)
    for role in ("user", "assistant")
]


class Api:
    """Asks greedily and shortly unless told otherwise."""

    def __init__(self, url: str) -> None:
        self.url = url

    def post(self, path: str, **fields: Any) -> httpx.Response:
        body = {"model": DEMO_MODEL.name, "temperature": 0, **ASKED[path], **fields}
        return HTTP.post(f"{self.url}{path}", json=body, timeout=120)

    def respond(self, **fields: Any) -> Response:
        answer = self.post(RESPONSES, **fields)
        assert answer.status_code == 200, answer.text
        return Response.model_validate_json(answer.content, strict=True)

    def message(self, **fields: Any) -> Message:
        answer = self.post(MESSAGES, **fields)
        assert answer.status_code == 200, answer.text
        return Message.model_validate_json(answer.content, strict=True)

    def events(self, path: str, **fields: Any) -> list[Any]:
        frames = self.post(path, stream=True, **fields).text.split("\n\n")[:-1]
        data = [frame.rpartition("\ndata: ")[2] for frame in frames if not frame.startswith(":")]
        shown = [each for each in data if json.loads(each)["type"] != "ping"]
        return [EVENTS[path].validate_json(each, strict=True) for each in shown]

    def ignores(self, path: str, **fields: Any) -> str:
        """What an answer does not honour of fields."""
        answer = self.post(path, **fields)
        assert answer.status_code == 200, answer.text
        return answer.headers.get("x-baton-ignored", "")

    def keeps(self, response_id: str) -> bool:
        """Whether a response can be had again."""
        answer = HTTP.get(f"{self.url}{RESPONSES}/{response_id}")
        assert answer.status_code in (200, 404), answer.text
        return answer.status_code == 200

    def refuses(self, path: str, **fields: Any) -> None:
        """Each field by its name."""
        for name, value in fields.items():
            answer = self.post(path, **{name: value})
            assert answer.status_code == 400, answer.text
            assert f"'{name}" in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with running_fleet() as fleet:
        yield Api(fleet.url)


OF_RESPONSES, OF_MESSAGES = Shown(), Shown()


@OF_RESPONSES.by("model", "input", "instructions")
def a_conversation(api: Api) -> None:
    plain = api.respond()
    items = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
    assert api.respond(input=items).output_text == plain.output_text
    assert api.respond(input="Explain the `with` statement.").output_text != plain.output_text
    assert api.respond(instructions="Be short").usage.input_tokens > plain.usage.input_tokens
    longer = [*items, *plain.model_dump()["output"], {"role": "user", "content": "And?"}]
    assert api.respond(input=longer).usage.input_tokens > plain.usage.total_tokens
    assert api.post(RESPONSES, model="other").status_code == 404


@OF_RESPONSES.by(*SamplingFields.model_fields)
@OF_MESSAGES.by(*SamplingFields.model_fields)
def sampling_as_in_chats(api: Api) -> None:
    """A unit test compares the sampling of each field with that of a chat."""
    said = api.message().content[0].text
    word = said.split()[3]
    for fields, text in (
        ({"regex": "b{3}c"}, "bbbc"),
        ({"structured_outputs": {"choice": ["yes"]}}, "yes"),
        ({"stop": word}, said.partition(word)[0]),
    ):
        assert api.respond(**fields).output_text == text
        assert api.message(**fields).content[0].text == text
    short = {"max_output_tokens": None, "n_predict": 4}
    assert api.respond(**short).usage.output_tokens == 4


@OF_RESPONSES.by("max_output_tokens", "temperature", "top_p")
def limits_and_sampling(api: Api) -> None:
    cut = api.respond(max_output_tokens=5)
    assert (cut.usage.output_tokens, cut.status) == (5, "incomplete")
    assert cut.incomplete_details.reason == "max_output_tokens"
    greedy = api.respond().output_text
    assert any(api.respond(temperature=2).output_text != greedy for _ in range(50))
    assert api.respond(temperature=2, top_p=0.001).output_text == greedy


@OF_RESPONSES.by("stream", "stream_options")
def events_of_a_response(api: Api) -> None:
    whole = api.respond()
    events = api.events(RESPONSES, stream_options={"include_obfuscation": False})
    assert [each.sequence_number for each in events] == list(range(len(events)))
    deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
    assert "".join(deltas) == events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens
    assert api.post(RESPONSES, stream_options={"include_obfuscation": False}).status_code == 400


@OF_RESPONSES.by("tools", "tool_choice", "parallel_tool_calls")
def functions(api: Api) -> None:
    names = ("weather", "time")
    tools = [{"type": "function", "name": name, "parameters": SCHEMA} for name in names]
    assert api.respond(tools=tools).usage.input_tokens > api.respond().usage.input_tokens
    called = {"tools": tools, "parallel_tool_calls": False, "max_output_tokens": 200}
    for choice in ("required", {"type": "function", "name": "time"}):
        answer = api.respond(tool_choice=choice, **called)
        [call] = [each for each in answer.output if each.type == "function_call"]
        assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
        assert call.name in (names if choice == "required" else ("time",))
    none = api.respond(tool_choice="none", **called)
    assert {each.type for each in none.output} == {"message"}
    assert api.post(RESPONSES, tool_choice="required").status_code == 400


@OF_RESPONSES.by("reasoning", "text")
def reasoning_and_form(api: Api) -> None:
    plain = api.respond().usage.input_tokens
    assert api.respond(reasoning={"effort": "none"}).usage.input_tokens > plain
    wanted = {"type": "json_schema", "name": "s", "schema": SCHEMA}
    text = api.respond(text={"format": wanted}, max_output_tokens=60).output_text
    assert json.loads(text)["city"] in ("Rome", "Oslo")
    assert api.respond(text={"format": {"type": "text"}}).output_text == api.respond().output_text
    ignored = api.ignores(RESPONSES, reasoning={"summary": "detailed"}, text={"verbosity": "low"})
    assert ignored == "reasoning.summary, text.verbosity"


@OF_RESPONSES.by("include", "top_logprobs")
def logprobs(api: Api) -> None:
    answer = api.respond(include=[LOGPROBS], top_logprobs=3)
    told = answer.output[0].content[0].logprobs
    assert "".join(each.token for each in told) == answer.output_text
    assert all(len(each.top_logprobs) == 3 for each in told)
    assert all(each.logprob == each.top_logprobs[0].logprob for each in told), "it is greedy"
    events = api.events(RESPONSES, include=[LOGPROBS], top_logprobs=3)
    deltas = [each for each in events if each.type == "response.output_text.delta"]
    assert [token.token for each in deltas for token in each.logprobs] == [
        each.token for each in told
    ]
    assert api.respond().output[0].content[0].logprobs == []
    api.refuses(RESPONSES, top_logprobs=3)
    encrypted = "reasoning.encrypted_content"
    assert api.ignores(RESPONSES, include=[encrypted]) == f"include[{encrypted}]"


@OF_RESPONSES.by("truncation")
def truncation(api: Api) -> None:
    items = [*TURNS, {"role": "user", "content": QUESTION}]
    assert api.post(RESPONSES, input=items).status_code == 400
    answer = api.respond(input=items, truncation="auto")
    assert answer.truncation == "auto"
    assert 3600 < answer.usage.input_tokens <= 4096 - NUM_TOKENS


@OF_RESPONSES.by(
    *("metadata", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("store", "background", "service_tier", "cache_salt", "cache_retention", "max_tool_calls"),
)
def labels(api: Api) -> None:
    named = dict.fromkeys(("user", "safety_identifier", "prompt_cache_key"), "me")
    answer = api.respond(metadata={"a": "b"}, store=False, service_tier="auto", **named)
    assert answer.output_text == api.respond().output_text
    assert (answer.metadata, answer.store, answer.service_tier) == ({"a": "b"}, False, "default")
    assert {name: getattr(answer, name) for name in named} == named
    hint = {"cache_retention": {"seconds": 5}}
    kept = api.respond(prompt_cache_retention="24h", service_tier="flex", max_tool_calls=1, **hint)
    assert kept.output_text == answer.output_text
    first, second = (
        api.respond(cache_salt="own", instructions="word " * 50).usage.input_tokens_details
        for _ in range(2)
    )
    assert first.cached_tokens == 0 < second.cached_tokens
    assert not api.keeps(answer.id)
    assert api.keeps(api.respond(store=True).id)
    assert api.respond(background=True).status == "queued"


@OF_RESPONSES.by("previous_response_id", "conversation", "prompt")
def what_needs_a_store(api: Api) -> None:
    first = api.respond()
    second = api.respond(input="And a closure?", previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.total_tokens
    assert api.post(RESPONSES, previous_response_id="resp_1").status_code == 400
    api.refuses(RESPONSES, conversation="c", prompt={"id": "p"})


@OF_MESSAGES.by("model", "messages", "system", "cache_control")
def a_dialogue(api: Api) -> None:
    plain = api.message()
    blocks = [{"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}]
    asked = [{"role": "user", "content": blocks}]
    assert api.message(messages=asked).content == plain.content
    assert api.message(cache_control={"type": "ephemeral"}).content == plain.content
    for system in ("Be short", [{"type": "text", "text": "Be short"}]):
        assert prompt_tokens(api.message(system=system)) > prompt_tokens(plain)
    half = plain.content[0].text[: len(plain.content[0].text) // 2].rpartition(" ")[0]
    begun = [*asked, {"role": "assistant", "content": half}]
    assert (half + api.message(messages=begun).content[0].text).startswith(plain.content[0].text)
    assert api.post(MESSAGES, model="other").status_code == 404


def prompt_tokens(message: Message) -> int:
    return message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


@OF_MESSAGES.by("max_tokens", "stop_sequences", "temperature", "top_p", "top_k")
def ends_and_sampling(api: Api) -> None:
    cut = api.message(max_tokens=5)
    assert (cut.usage.output_tokens, cut.stop_reason) == (5, "max_tokens")
    text = api.message().content[0].text
    word = text.split()[3]
    stopped = api.message(stop_sequences=[word])
    assert stopped.content[0].text == text.partition(word)[0]
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    odd: dict[str, Any] = {"messages": [{"role": "user", "content": "qz 17 blue, or"}]}
    greedy = api.message(**odd).content
    assert any(api.message(temperature=1, **odd).content != greedy for _ in range(50))
    for narrow in ({"top_k": 1}, {"top_p": 0.001}):
        assert api.message(temperature=1, **odd, **narrow).content == greedy


@OF_MESSAGES.by("stream")
def events_of_a_message(api: Api) -> None:
    whole = api.message()
    events = api.events(MESSAGES)
    deltas = [each.delta.text for each in events if each.type == "content_block_delta"]
    assert "".join(deltas) == whole.content[0].text
    assert events[-2].usage.output_tokens == whole.usage.output_tokens


@OF_MESSAGES.by("tools", "tool_choice")
def tools(api: Api) -> None:
    offered = [{"name": name, "input_schema": SCHEMA} for name in ("weather", "time")]
    assert prompt_tokens(api.message(tools=offered)) > prompt_tokens(api.message())
    for choice in ({"type": "any"}, {"type": "tool", "name": "time"}):
        choice |= {"disable_parallel_tool_use": True}
        answer = api.message(tools=offered, tool_choice=choice, max_tokens=200)
        [call] = answer.content
        assert call.input["city"] in ("Rome", "Oslo")
        assert call.name == choice.get("name", call.name)
        assert answer.stop_reason == "tool_use"
    none = api.message(tools=offered, tool_choice={"type": "none"})
    assert {each.type for each in none.content} == {"text"}


@OF_MESSAGES.by("thinking", "output_config", "output_format")
def thinking_and_form(api: Api) -> None:
    plain = prompt_tokens(api.message())
    assert prompt_tokens(api.message(thinking={"type": "disabled"})) > plain
    assert prompt_tokens(api.message(output_config={"effort": "high"})) == plain
    wanted = {"format": {"type": "json_schema", "schema": SCHEMA}}
    for form in ({"output_config": wanted}, {"output_format": wanted["format"]}):
        text = api.message(**form, max_tokens=60).content[0].text
        assert json.loads(text)["city"] in ("Rome", "Oslo")


@OF_MESSAGES.by(
    *("metadata", "service_tier", "speed", "cache_salt", "cache_retention"),
    *("container", "inference_geo", "mcp_servers", "context_management", "thread"),
)
def labels_and_services(api: Api) -> None:
    plain = api.message().content
    assert api.message(metadata={"user_id": "me"}, service_tier="auto").content == plain
    assert api.message(speed="standard", mcp_servers=[]).content == plain
    assert api.message(cache_retention={"seconds": 5}).content == plain
    assert api.message(service_tier="flex", cache_salt="own").usage.cache_read_input_tokens == 0
    services = {"container": "c", "speed": "fast", "mcp_servers": [{}], "context_management": {}}
    assert set(api.ignores(MESSAGES, **services).split(", ")) == services.keys()
    api.refuses(MESSAGES, inference_geo="eu", thread={"type": "create"})


CHECKS = dict.fromkeys([*OF_RESPONSES.values(), *OF_MESSAGES.values()])


@pytest.mark.parametrize("assert_effect", CHECKS, ids=lambda each: each.__name__)
def test_a_parameter_has_its_effect(api: Api, assert_effect: Check) -> None:
    assert_effect(api)


def test_every_field_is_shown() -> None:
    for shown, schema in ((OF_RESPONSES, ResponsesRequest), (OF_MESSAGES, MessagesRequest)):
        missing = schema.model_fields.keys() - shown.keys()
        assert not missing, f"show the effect of {missing} here"
