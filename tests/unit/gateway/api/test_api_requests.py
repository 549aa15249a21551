"""What the API asks of the generator, field by field."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import processors

from gateway.api.sampling_params import choice_seed
from gateway.text.tokenizer import Tokenizer
from protocol.errors import Overloaded
from protocol.sampling import SamplingParams
from router.requests.interface import GenerationRequest
from tests.unit.gateway.api_harness import MAX_CONTEXT, MODEL, LiveApi, events_of

END = 1
CONFIGURED_END = 0


def only_request(api) -> GenerationRequest:
    (request,) = api.generator.requests
    return request


def test_what_the_caller_leaves_out_is_the_checkpoint_s(api):
    api.complete(seed=5)
    assert only_request(api).sampling == SamplingParams(
        max_tokens=16,
        seed=5,
        temperature=0.7,
        top_k=20,
        stop_token_ids=(CONFIGURED_END, END),
    )


def test_every_field_reaches_the_generator(api):
    api.complete(
        seed=7,
        max_tokens=9,
        min_tokens=2,
        temperature=0,
        top_k=-1,
        top_p=0.5,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=2,
        logit_bias={"10": -100, "11": 2.5},
        logprobs=3,
        stop_token_ids=[12, 13, 12],
        allowed_token_ids=[15, 14, 15],
        bad_words=["one"],
        ignore_eos=True,
        priority=-4,
        cache_salt="tenant",
    )
    request = only_request(api)
    spellings = [api.tokenizer.encode(each, add_special_tokens=False) for each in ("one", " one")]
    bad_words = tuple(map(tuple, spellings))
    assert request.sampling == SamplingParams(
        max_tokens=9,
        seed=7,
        min_tokens=2,
        temperature=0.0,
        top_k=0,
        top_p=0.5,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        logit_bias={10: -100.0, 11: 2.5},
        logprobs=3,
        stop_token_ids=(12, 13),
        allowed_token_ids=(14, 15),
        bad_words=bad_words,
    )
    assert (request.priority, request.cache_salt) == (4, "/tenant")
    assert request.deadline_ms == 600_000


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 4}, 4),
    ],
)
def test_logprobs_of_a_chat(api, fields, logprobs):
    api.chat(**fields)
    assert only_request(api).sampling.logprobs == logprobs


@pytest.mark.parametrize(
    ("fields", "limit"),
    [({}, None), ({"max_tokens": 5}, 5), ({"max_completion_tokens": 6}, 6)],
)
def test_the_output_limit_of_a_chat(api, fields, limit):
    """Without one, all that the context has left."""
    api.chat(**fields)
    request = only_request(api)
    assert request.sampling.max_tokens == (limit or MAX_CONTEXT - len(request.token_ids))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"stop_token_ids": [END]}, None),  # it would have ended the text anyway
        ({"stop_token_ids": [END], "ignore_eos": True}, END),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_models_own_end_is_no_stop_that_somebody_named(api, fields, reason, stream):
    for answer in (api.complete(stream=stream, **fields), api.chat(stream=stream, **fields)):
        last = events_of(answer.text)[-1] if stream else answer.json()
        assert last["choices"][0]["finish_reason"] == "stop"
        assert last["choices"][0]["stop_reason"] == reason


def test_which_end_of_a_prompt_is_kept(api):
    ids = [*range(40, 60)]
    for side, kept in ((None, ids[-5:]), ("left", ids[-5:]), ("right", ids[:5])):
        api.complete(prompt=ids, truncate_prompt_tokens=5, truncation_side=side)
        assert api.generator.requests[-1].token_ids == kept


@pytest.fixture(scope="module")
def beginning_api(checkpoint, tmp_path_factory) -> Iterator[LiveApi]:
    """A model whose texts begin with a special token."""
    folder = Path(shutil.copytree(checkpoint, tmp_path_factory.mktemp("beginning") / "model"))
    raw = HfTokenizer.from_file(str(folder / "tokenizer.json"))
    raw.post_processor = processors.TemplateProcessing("<|start|> $A", None, [("<|start|>", 0)])
    raw.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer(folder)
    with LiveApi(folder, tokenizer) as live:
        yield live
    tokenizer.close()


@pytest.mark.parametrize(
    ("wish", "of_text", "of_chat"), [(None, 1, 0), (True, 1, 1), (False, 0, 0)]
)
def test_special_tokens_before_a_prompt(beginning_api, wish, of_text, of_chat):
    beginning_api.reset()
    usual = beginning_api.tokenizer.encode("<|start|>user\nHi<|end|>\n<|start|>assistant\n", False)
    beginning_api.complete("Hi", add_special_tokens=wish)
    beginning_api.chat("Hi", add_special_tokens=wish)
    text, chat = [each.token_ids for each in beginning_api.generator.requests]
    assert text == [0] * of_text + beginning_api.tokenizer.encode("Hi", False)
    assert chat == [0] * of_chat + usual
    for asked, sent in (
        ({"prompt": "Hi"}, text),
        ({"messages": [{"role": "user", "content": "Hi"}]}, chat),
    ):
        answer = beginning_api.post("/tokenize", asked | {"add_special_tokens": wish})
        assert answer.json()["tokens"] == sent


def test_tokens_by_their_ids(api):
    by_id = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = api.chat(logprobs=True, top_logprobs=1, **by_id).json()["choices"][0]
    told, ids = choice["logprobs"]["content"], choice["token_ids"]
    names = [f"token_id:{each}" for each in ids]
    assert [each["token"] for each in told] == names
    assert [each["top_logprobs"][0]["token"] for each in told] == names
    assert b"".join(bytes(each["bytes"]) for each in told) == b"Hello<|end|>"
    echoed = {"prompt": [65, 66], "echo": True, "logprobs": 1}
    choice = api.complete(**echoed, **by_id).json()["choices"][0]
    told = choice["logprobs"]
    assert told["tokens"] == [f"token_id:{each}" for each in [65, 66, *ids]]
    assert all(
        name in top for name, top in zip(told["tokens"], told["top_logprobs"], strict=True) if top
    )
    assert choice["text"].endswith("Hello")


def test_the_default_limit_of_a_completion_is_cut_to_the_context(api):
    api.complete(prompt=[65] * (MAX_CONTEXT - 3))
    assert only_request(api).sampling.max_tokens == 3


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hi", ["Hi"]),
        (["Hi", "Ho"], ["Hi", "Ho"]),
        ([72, 73], [[72, 73]]),
        ([[72], [73, 74]], [[72], [73, 74]]),
    ],
)
def test_the_forms_of_a_prompt(api, prompt, expected):
    answer = api.complete(prompt=prompt, return_token_ids=True).json()
    wanted = [
        each if isinstance(each, list) else api.tokenizer.encode(each, add_special_tokens=True)
        for each in expected
    ]
    assert [request.token_ids for request in api.generator.requests] == wanted
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == wanted


def test_choices_come_prompt_by_prompt(api):
    answer = api.complete(prompt=["a", "b"], n=2, echo=True).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == ["aHello"] * 2 + ["bHello"] * 2


def test_seeds_differ_by_choice_and_repeat_by_request(api):
    for _ in range(2):
        api.complete(prompt=["a", "b"], n=3, seed=-9)
    seeds = [request.sampling.seed for request in api.generator.requests]
    assert seeds[:3] == seeds[3:6] == seeds[6:9] == seeds[9:]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_without_a_seed_every_sequence_has_its_own(api):
    api.complete(prompt=["a", "a"], n=2)
    assert len({request.sampling.seed for request in api.generator.requests}) == 4


def test_the_first_choice_keeps_the_request_s_seed():
    assert choice_seed(17, 0) == 17
    assert choice_seed(17, 1) != choice_seed(18, 1)


def test_nothing_is_generated_where_only_the_echo_is_wanted(api):
    answer = api.complete(prompt="Hello there", echo=True, max_tokens=0).json()
    assert answer["choices"][0]["text"] == "Hello there"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert api.generator.requests == []


def test_an_echo_of_token_ids_is_their_text(api):
    ids = api.tokenizer.encode("Hi wörld", add_special_tokens=False)
    assert api.complete(prompt=ids, echo=True).json()["choices"][0]["text"] == "Hi wörldHello"


@pytest.mark.parametrize(("skip", "text"), [(None, "A"), (True, "A"), (False, "<|start|>A")])
def test_special_tokens_are_shown_if_asked_for(api, skip, text):
    api.says("<|start|>A")
    answer = api.complete(skip_special_tokens=skip).json()
    assert answer["choices"][0]["text"] == text


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one two")])
def test_the_stop_string_is_shown_if_asked_for(api, include, text):
    api.says("one two three")
    fields = {"stop": ["two"], "include_stop_str_in_output": include, "max_tokens": 50}
    assert api.complete(**fields).json()["choices"][0]["text"] == text


def test_token_ids_are_those_generated_whatever_their_text(api):
    api.says("one")
    answer = api.chat(return_token_ids=True).json()
    ids = [*api.tokenizer.encode("one", add_special_tokens=False), END]
    assert answer["choices"][0]["token_ids"] == ids
    assert answer["prompt_token_ids"] == only_request(api).token_ids


def test_text_parts_become_lines(api):
    api.chat([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])
    text = api.tokenizer.decode(only_request(api).token_ids, skip_special_tokens=False)
    assert "<|start|>user\none\ntwo<|end|>" in text


def test_a_developer_speaks_as_the_system_to_templates_that_know_no_developer(api):
    messages = [{"role": "developer", "content": "Be brief"}]
    api.post("/v1/chat/completions", {"model": MODEL, "messages": messages})
    text = api.tokenizer.decode(only_request(api).token_ids, skip_special_tokens=False)
    assert text.startswith("<|start|>system\nBe brief")


def test_the_template_gets_its_variables(api):
    api.chat(add_generation_prompt=False, chat_template_kwargs={"mood": "glad"})
    text = api.tokenizer.decode(only_request(api).token_ids, skip_special_tokens=False)
    assert text == "<|start|>user\nHi<|end|>\nglad"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages"])
def test_a_request_that_was_refused_names_no_receipt(api, path: str):
    answer = api.post(path, {"model": MODEL, "temperature": "hot"})
    assert answer.status_code == 400
    assert answer.headers["x-baton-request-id"]
    assert "x-baton-receipt" not in answer.headers


def test_a_generation_that_failed_has_a_receipt(api):
    api.generator.script = lambda request: [Overloaded("no worker is ready")]
    answer = api.complete()
    assert answer.status_code == 503
    own = answer.headers["x-baton-request-id"]
    assert answer.headers["x-baton-receipt"] == f"/v1/requests/{own}/receipt"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "stop", [{}, {"stop": ["el"]}, {"stop_token_ids": [76]}, {"max_tokens": 2}]
)
def test_every_generated_token_has_an_id_and_a_log_probability(api, stream, stop):
    """Also those that a stop cut off the text, and the one that ended it."""
    fields = {"stream": stream, "return_token_ids": True, **stop}
    for ask, listed in ((api.chat, "content"), (api.complete, "tokens")):
        answer = ask(logprobs=True if ask == api.chat else 1, **fields)
        parts = events_of(answer.text) if stream else [answer.json()]
        choices = [part["choices"][0] for part in parts]
        ids = [id_ for choice in choices for id_ in choice["token_ids"]]
        entries = [each for choice in choices for each in choice["logprobs"][listed]]
        assert len(entries) == len(ids) > 0
        if not stream:
            assert len(ids) == answer.json()["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "prefix"),
    [
        ("/v1/completions", {"prompt": "x"}, "cmpl-"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "chatcmpl-"),
        ("/v1/responses", {"input": "x"}, "resp_"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}, "msg_"),
    ],
)
def test_ids_cannot_be_guessed(api, path, body, prefix):
    """Who knows the id of a stream may resume it, and read a response that is kept."""
    ids = [api.post(path, {"model": MODEL, **body}).json()["id"] for _ in range(3)]
    assert len(set(ids)) == 3
    assert all(re.fullmatch(f"{prefix}[0-9a-f]{{32}}", each) for each in ids)


def test_whole_numbers_with_a_point_are_integers(api):
    """As Gson and others write them. Text that looks like one stays."""
    body = (
        b'{"model": "tiny", "prompt": "1.0 \\" 2.0", "max_tokens": 3.0, "stop_token_ids": [7.00],'
        b' "seed": 4.0, "temperature": 1.0, "top_p": 0.50}'
    )
    answer = api.http.post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 200, answer.text
    request = only_request(api)
    assert api.tokenizer.decode(request.token_ids) == '1.0 " 2.0'
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.seed, sampling.top_p) == (3, 4, 0.5)


@pytest.mark.parametrize("number", ["3.5", "3.0e0", '"3"', "true"])
def test_other_numbers_are_no_integers(api, number):
    body = f'{{"model": "tiny", "prompt": "x", "max_tokens": {number}, "seed": 1.0}}'
    answer = api.http.post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")
