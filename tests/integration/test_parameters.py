"""Every parameter alone, sent to the demo model: what it changes in the answer.

Each answer, and each event of a stream, is read by OpenAI's own types on the way. A field without
a test here fails `test_every_field_is_shown`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from cli.fleet import Fleet
from router.api.chat_request import ChatRequest
from router.api.completion_request import CompletionRequest
from tests.integration.fleets import running_fleet, wait_for
from tests.integration.openai_types import post, post_stream
from tests.integration.reference import DEMO_MODEL

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTION = [{"role": "user", "content": "What is a lambda?"}]
PROMPT = "The with statement is used to wrap the execution of a block with methods defined by a "
HOT: dict[str, Any] = {"temperature": 2.0, "seed": 3}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
LONG = {"max_tokens": 1000}
TOOLS: dict[str, Any] = {"tools": [WEATHER, TIME], "max_tokens": 200}


class Api:
    """Asks greedily and shortly unless told otherwise."""

    def __init__(self, url: str) -> None:
        self.url = url

    def body(self, path: str, fields: dict[str, Any]) -> dict[str, Any]:
        asked = {"messages": QUESTION} if path == CHAT else {"prompt": PROMPT}
        return {"model": DEMO_MODEL.name, "temperature": 0, "max_tokens": 24, **asked, **fields}

    def chat(self, **fields: Any) -> dict[str, Any]:
        return post(self.url, CHAT, self.body(CHAT, fields))

    def complete(self, **fields: Any) -> dict[str, Any]:
        return post(self.url, COMPLETIONS, self.body(COMPLETIONS, fields))

    def stream(self, path: str = CHAT, **fields: Any) -> list[dict[str, Any]]:
        return post_stream(self.url, path, self.body(path, fields))

    def text(self, **fields: Any) -> str:
        return str(self.complete(**fields)["choices"][0]["text"])

    def ids(self, **fields: Any) -> list[int]:
        answer = self.complete(return_token_ids=True, **fields)
        return list(answer["choices"][0]["token_ids"])

    def message(self, **fields: Any) -> dict[str, Any]:
        return dict(self.chat(**fields)["choices"][0]["message"])

    def prompt_tokens(self, **fields: Any) -> int:
        return int(self.chat(**fields)["usage"]["prompt_tokens"])

    def refusal(self, path: str, **fields: Any) -> str:
        answer = httpx.post(f"{self.url}{path}", json=self.body(path, fields), timeout=60)
        assert answer.status_code == 400, answer.text
        return str(answer.json()["error"]["param"])


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    fleet: Fleet
    with running_fleet() as fleet:
        yield Api(fleet.url)


Check = Callable[[Api], None]
SHOWN: dict[str, Check] = {}


def shows(*fields: str) -> Callable[[Check], Check]:
    """Registers what shows the effect of some fields."""

    def register(check: Check) -> Check:
        SHOWN.update(dict.fromkeys(fields, check))
        return check

    return register


@shows("temperature", "seed")
def heat_and_seed(api: Api) -> None:
    assert api.text(**HOT) == api.text(**HOT) != api.text()
    assert api.text(**HOT) != api.text(**HOT | {"seed": 4})


@shows("top_p", "top_k", "min_p")
def filters(api: Api) -> None:
    for narrow in ({"top_p": 0.001}, {"top_k": 1}, {"min_p": 1.0}):
        assert api.text(**HOT, **narrow) == api.text()


@shows("presence_penalty", "frequency_penalty", "repetition_penalty")
def penalties(api: Api) -> None:
    plain = api.ids(max_tokens=60, ignore_eos=True)
    for penalty in (
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 3.0},
    ):
        other = api.ids(max_tokens=60, ignore_eos=True, **penalty)
        assert len(set(other)) > len(set(plain))


@shows("logit_bias")
def bias(api: Api) -> None:
    first = api.ids()[0]
    assert api.ids(logit_bias={str(first): -100})[0] != first
    assert set(api.ids(logit_bias={"300": 100})) == {300}


@shows("allowed_token_ids", "bad_words")
def vocabulary(api: Api) -> None:
    assert set(api.ids(allowed_token_ids=[300, 301])) <= {300, 301}
    word = api.text().split()[3]
    assert word in api.text()
    assert word not in api.text(bad_words=[word])


@shows("n", "best_of")
def choices(api: Api) -> None:
    candidates = api.complete(n=4, logprobs=0, **HOT)["choices"]
    texts = [each["text"] for each in candidates]
    assert len(set(texts)) == 4
    assert texts[0] == api.text(**HOT)
    told = [each["logprobs"]["token_logprobs"] for each in candidates]
    means = {text: sum(each) / len(each) for text, each in zip(texts, told, strict=True)}
    best = sorted(texts, key=lambda text: -means[text])
    assert [each["text"] for each in api.complete(n=2, best_of=4, **HOT)["choices"]] == best[:2]
    assert api.text(best_of=4, **HOT) == best[0]


@shows("stop", "include_stop_str_in_output")
def stop_strings(api: Api) -> None:
    word = api.text().split()[3]
    before, _, _ = api.text().partition(word)
    assert api.text(stop=word) == before
    assert api.text(stop=["no such text", word]) == before
    assert api.text(stop=word, include_stop_str_in_output=True) == before + word
    told = [api.complete(stop=word), api.stream(COMPLETIONS, stop=word)[-1]]
    word_of_chat = api.message()["content"].split()[3]
    told += [api.chat(stop=word_of_chat), api.stream(CHAT, stop=word_of_chat)[-1]]
    reasons = [each["choices"][0]["stop_reason"] for each in told]
    assert reasons == [word, word, word_of_chat, word_of_chat]


@shows("stop_token_ids")
def stop_tokens(api: Api) -> None:
    ids = api.ids()
    cut = ids.index(ids[4])
    assert api.ids(stop_token_ids=[ids[4]]) == ids[: cut + 1]
    [choice] = api.complete(stop_token_ids=[ids[4]])["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[4])
    assert api.complete()["choices"][0]["stop_reason"] is None


@shows("ignore_eos", "min_tokens", "skip_special_tokens")
def end_of_text(api: Api) -> None:
    whole = api.chat(max_tokens=300)
    assert whole["choices"][0]["finish_reason"] == "stop"
    length = whole["usage"]["completion_tokens"]
    on = {"max_tokens": length + 8}
    endless = api.chat(ignore_eos=True, **on)
    assert endless["choices"][0]["finish_reason"] == "length"
    assert "<|im_end|>" not in endless["choices"][0]["message"]["content"]
    shown = api.message(ignore_eos=True, skip_special_tokens=False, **on)
    assert "<|im_end|>" in shown["content"]
    longer = api.chat(min_tokens=length + 4, **on)
    assert longer["usage"]["completion_tokens"] >= length + 4


@shows("max_tokens", "max_completion_tokens")
def limits(api: Api) -> None:
    assert api.complete(max_tokens=5)["usage"]["completion_tokens"] == 5
    limited = api.chat(max_tokens=None, max_completion_tokens=6)
    assert limited["usage"]["completion_tokens"] == 6
    assert limited["choices"][0]["finish_reason"] == "length"


@shows("logprobs", "top_logprobs")
def logprobs(api: Api) -> None:
    content = api.chat(logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]["content"]
    assert all(len(each["top_logprobs"]) == 3 for each in content)
    assert "".join(each["token"] for each in content) == api.message()["content"]
    listed = api.complete(logprobs=2)["choices"][0]["logprobs"]
    assert "".join(listed["tokens"]) == api.text()


@shows("return_tokens_as_token_ids")
def logprobs_by_id(api: Api) -> None:
    [choice] = api.complete(logprobs=0, return_token_ids=True, return_tokens_as_token_ids=True)[
        "choices"
    ]
    assert choice["logprobs"]["tokens"] == [f"token_id:{each}" for each in choice["token_ids"]]
    told = api.chat(logprobs=True, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert all(each["token"].startswith("token_id:") for each in told["content"])


@shows("prompt_logprobs")
def prompt_logprobs(api: Api) -> None:
    answer = api.chat(prompt_logprobs=1, return_token_ids=True)
    first, *others = api.stream(prompt_logprobs=1)
    assert first["prompt_logprobs"] == answer["prompt_logprobs"]
    assert not any("prompt_logprobs" in each for each in others)
    told, ids = answer["prompt_logprobs"], answer["prompt_token_ids"]
    assert told[0] is None
    assert [next(iter(each)) for each in told[1:]] == [str(each) for each in ids[1:]]
    assert all(1 in [entry["rank"] for entry in each.values()] for each in told[1:])
    [choice] = api.complete(prompt_logprobs=0)["choices"]
    assert all(len(each) == 1 for each in choice["prompt_logprobs"][1:])


@shows("return_token_ids")
def token_ids(api: Api) -> None:
    answer = api.chat(return_token_ids=True)
    assert len(answer["choices"][0]["token_ids"]) == answer["usage"]["completion_tokens"]
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]


@shows("stream", "stream_options")
def streams(api: Api) -> None:
    for path, key in ((CHAT, "delta"), (COMPLETIONS, "text")):
        events = api.stream(path, stream_options={"include_usage": True})
        assert events[-1]["choices"] == []
        assert events[-1]["usage"]["completion_tokens"] == 24
        assert all(each["usage"] is None for each in events[:-1])
        pieces = [each["choices"][0][key] for each in events[:-1]]
        text = "".join(each if key == "text" else each.get("content", "") for each in pieces)
        assert text == (api.text() if key == "text" else api.message()["content"])
        options = {"include_usage": True, "continuous_usage_stats": True}
        counts = [
            each["usage"]["completion_tokens"] for each in api.stream(path, stream_options=options)
        ]
        assert counts == sorted(counts)
        assert 0 < counts[0] < counts[-1] == 24


@shows("truncate_prompt_tokens", "truncation_side")
def truncation(api: Api) -> None:
    assert api.prompt_tokens(truncate_prompt_tokens=7) == 7
    ids = [*range(300, 330)]
    cut = api.complete(prompt=ids, truncate_prompt_tokens=9, return_token_ids=True)
    assert cut["choices"][0]["prompt_token_ids"] == ids[-9:]
    cut = api.complete(
        prompt=ids, truncate_prompt_tokens=9, truncation_side="right", return_token_ids=True
    )
    assert cut["choices"][0]["prompt_token_ids"] == ids[:9]
    assert api.complete(prompt=ids * 200, truncate_prompt_tokens=-1)["usage"]["total_tokens"] == (
        4096
    )


@shows(
    *("request_id", "service_tier", "user", "metadata", "store"),
    *("prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
)
def bookkeeping(api: Api) -> None:
    assert api.chat(request_id="mine")["id"] == "chatcmpl-mine"
    assert api.complete(request_id="mine")["id"] == "cmpl-mine"
    assert api.chat(service_tier="auto")["service_tier"] == "default"
    plain = api.message()
    for silent in (
        {"user": "me", "prompt_cache_key": "mine", "safety_identifier": "me"},
        {"metadata": {"a": "b"}, "store": False, "prompt_cache_retention": "in_memory"},
    ):
        assert api.message(**silent) == plain
    assert api.refusal(CHAT, store=True) == "store"


@shows("priority")
def priority(api: Api) -> None:
    """Of two prompts that come when others wait, one overtakes these, and one lets all pass."""
    done: list[int] = []

    def ask(number: int, **fields: Any) -> None:
        ids = [300 + (97 * number + 7 * place) % 700 for place in range(2000)]
        api.complete(prompt=ids, max_tokens=1, **fields)
        done.append(number)

    def has_queue() -> bool:
        listed = httpx.get(f"{api.url}/fleet").json()
        return any(each["role"] == "prefill" and each["num_waiting"] >= 6 for each in listed)

    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(ask, number) for number in range(10)]
        wait_for("a queue", has_queue)
        asked += [pool.submit(ask, 10, priority=5), pool.submit(ask, 11, priority=-5)]
        for each in asked:
            each.result()
    assert done[-1] == 10
    assert done.index(11) < len(done) - 3


@shows("cache_salt")
def salt(api: Api) -> None:
    def cached(**fields: Any) -> int:
        usage = api.complete(prompt=[*range(400, 500)], **fields)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() > 0
    assert cached(cache_salt="mine") == 0
    assert cached(cache_salt="mine") > 0


@shows("messages", "model")
def conversation(api: Api) -> None:
    other = api.message(messages=[{"role": "user", "content": "Explain the `with` statement."}])
    assert other != api.message()
    answer = httpx.post(f"{api.url}{CHAT}", json=api.body(CHAT, {"model": "other"}))
    assert answer.status_code == 404


@shows("prompt", "echo")
def prompts(api: Api) -> None:
    ids = api.complete(max_tokens=1, return_token_ids=True)["choices"][0]["prompt_token_ids"]
    assert api.text(prompt=ids) == api.text()
    for several in ([PROMPT, "A class"], [ids, [*range(300, 310)]]):
        texts = [each["text"] for each in api.complete(prompt=several)["choices"]]
        assert texts[0] == api.text()
        assert len(texts) == 2
    assert api.text(echo=True) == PROMPT + api.text()
    assert api.text(prompt=ids, echo=True, max_tokens=0) == PROMPT


@shows("suffix")
def suffix(api: Api) -> None:
    assert api.refusal(COMPLETIONS, suffix="end") == "suffix"
    assert api.text(suffix="") == api.text()


@shows("add_generation_prompt", "continue_final_message")
def end_of_prompt(api: Api) -> None:
    assert api.prompt_tokens(add_generation_prompt=False) < api.prompt_tokens()
    begun = api.message(max_tokens=30)["content"]
    half = begun[: len(begun) // 2].rpartition(" ")[0]
    messages = [*QUESTION, {"role": "assistant", "content": half}]
    rest = api.message(messages=messages, continue_final_message=True, max_tokens=60)["content"]
    assert (half + rest).startswith(begun)


@shows("chat_template_kwargs", "reasoning_effort", "documents")
def template(api: Api) -> None:
    plain = api.prompt_tokens()
    without = api.prompt_tokens(chat_template_kwargs={"enable_thinking": False})
    assert without > plain
    assert api.prompt_tokens(reasoning_effort="none") == without
    assert api.prompt_tokens(reasoning_effort="high") == plain
    assert api.refusal(CHAT, chat_template_kwargs={"no_such": 1}) == "chat_template_kwargs"
    assert api.prompt_tokens(documents=[{"title": "a", "text": "b"}]) > plain
    for name in ("chat_template", "verbosity", "prediction"):
        assert api.refusal(CHAT, **{name: "x"}) == name


@shows("response_format", "structured_outputs")
def structure(api: Api) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    strict = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    assert json.loads(api.message(response_format=strict, max_tokens=50)["content"])["a"] in (1, 2)
    loose = api.message(response_format={"type": "json_object"}, frequency_penalty=1, **LONG)
    assert isinstance(json.loads(loose["content"]), dict)
    assert api.message(response_format={"type": "text"}) == api.message()
    assert api.text(structured_outputs={"choice": ["yes", "no"]}) in ("yes", "no")
    assert json.loads(api.text(structured_outputs={"json": schema}))["a"] in (1, 2)
    assert re.fullmatch("[ab]{3}7", api.text(structured_outputs={"regex": "[ab]{3}7"}))
    for grammar in ('start: "x" ("1" | "2")', 'root ::= "x" ("1" | "2")'):
        assert api.text(structured_outputs={"grammar": grammar}) in ("x1", "x2")
    loose_text = api.text(structured_outputs={"json_object": True}, frequency_penalty=1, **LONG)
    assert isinstance(json.loads(loose_text), dict)
    either = api.message(response_format=strict, **TOOLS)
    assert either.get("tool_calls") or json.loads(either["content"])["a"] in (1, 2)
    regex = {"regex": "[ab]{3}7"}
    assert api.refusal(CHAT, tools=[TIME], structured_outputs=regex) == "tool_choice"


@shows("tools")
def tools(api: Api) -> None:
    assert api.prompt_tokens(tools=[WEATHER]) > api.prompt_tokens()
    assert api.message(tools=[WEATHER])["content"]
    call = {"id": "c1", "type": "function"}
    call["function"] = {"name": "get_weather", "arguments": '{"city": "Rome", "days": 1}'}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    assert api.prompt_tokens(messages=messages) > api.prompt_tokens() + 20


def checked_call(message: dict[str, Any]) -> str:
    """Name of the only call of a message; its arguments follow the tool's schema."""
    assert message["content"] is None
    [call] = message["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "get_weather":
        assert arguments["city"] in ("Rome", "Oslo")
        assert arguments["days"] in (1, 2)
    return str(call["function"]["name"])


@shows("tool_choice", "parallel_tool_calls")
def tool_choice(api: Api) -> None:
    one = {"parallel_tool_calls": False, **TOOLS}
    required = api.chat(tool_choice="required", **one)["choices"][0]
    assert checked_call(required["message"]) in ("get_weather", "get_time")
    assert required["finish_reason"] == "tool_calls"
    for name in ("get_weather", "get_time"):
        named = {"type": "function", "function": {"name": name}}
        whole = api.chat(tool_choice=named, **TOOLS)["choices"][0]["message"]
        if name == "get_weather":
            assert checked_call(whole) == name
            assert streamed_calls(api.stream(tool_choice=named, **TOOLS)) == [
                (call["function"]["name"], call["function"]["arguments"])
                for call in whole["tool_calls"]
            ]
    assert "tool_calls" not in api.message(tool_choice="none", **TOOLS)
    assert api.refusal(CHAT, tool_choice="required") == "tool_choice"


def streamed_calls(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for event in events:
        for call in event["choices"][0]["delta"].get("tool_calls", ()):
            function = call["function"]
            if "name" in function:
                names[call["index"]] = function["name"]
            arguments[call["index"]] = arguments.get(call["index"], "") + function["arguments"]
    return [(names[index], text) for index, text in arguments.items()]


@shows("functions", "function_call")
def legacy_functions(api: Api) -> None:
    assert api.refusal(CHAT, functions=[{"name": "f"}]) == "functions"
    assert api.refusal(CHAT, function_call="auto") == "function_call"


REFUSED = {
    "audio": {},
    **{f"guided_{name}": "x" for name in ("json", "regex", "choice", "grammar")},
    "length_penalty": 2,
    "chat_template": "x",
    "modalities": ["audio"],
    "prediction": {},
    "use_beam_search": True,
    "verbosity": "low",
    "web_search_options": {},
}
NOT_OF_THIS_MODEL = {"add_special_tokens", "include_reasoning"}
"""It does not think, and its tokenizer adds nothing: unit tests show the effect of these two."""


@pytest.mark.parametrize("check", dict.fromkeys(SHOWN.values()), ids=lambda each: each.__name__)
def test_a_parameter_has_its_effect(api: Api, check: Check) -> None:
    check(api)


def test_every_field_is_shown(api: Api) -> None:
    fields = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    missing = fields - SHOWN.keys() - REFUSED.keys() - NOT_OF_THIS_MODEL
    assert not missing, f"show the effect of {missing} here"
    for name, value in REFUSED.items():
        path = CHAT if name in ChatRequest.model_fields else COMPLETIONS
        assert api.refusal(path, **{name: value}) == name
