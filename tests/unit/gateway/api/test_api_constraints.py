"""Limits and constraints under every server's names, at every endpoint: served, or refused with the
name of a field that is; never dropped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from gateway.api.operations import OPERATIONS
from gateway.api.unknown_fields.lost_constraints import replacement
from gateway.grammars.grammar import (
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)
from protocol.sampling import SamplingParams
from tests.effort import some
from tests.unit.gateway.api_harness import MODEL, LiveApi

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
ASK = [{"role": "user", "content": "x"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": ASK},
    COMPLETIONS: {"prompt": "x"},
    RESPONSES: {"input": "x"},
    MESSAGES: {"messages": ASK, "max_tokens": 100},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
BY_SCHEMA, ANY_OBJECT = json_schema_grammar(SCHEMA), json_object_grammar()
GBNF = 'root ::= "a" | "b"'
BY_GBNF, BY_REGEX = lark_grammar(GBNF, "grammar"), regex_grammar("a+")
NAMED = {"name": "a", "schema": SCHEMA}
every_endpoint = pytest.mark.parametrize("path", BODIES)

CONSTRAINTS: list[tuple[dict[str, Any], str | None]] = [
    ({"grammar": GBNF}, BY_GBNF),
    ({"ebnf": GBNF}, BY_GBNF),
    ({"regex": "a+"}, BY_REGEX),
    ({"json_schema": SCHEMA}, BY_SCHEMA),
    ({"json_schema": json.dumps(SCHEMA)}, BY_SCHEMA),
    ({"json_schema": NAMED}, BY_SCHEMA),
    ({"format": "json"}, ANY_OBJECT),
    ({"format": SCHEMA}, BY_SCHEMA),
    ({"grammar": {"type": "json", "value": SCHEMA}}, BY_SCHEMA),
    ({"grammar": {"type": "json_schema", "value": NAMED}}, BY_SCHEMA),
    ({"grammar": {"type": "regex", "value": "a+"}}, BY_REGEX),
    ({"structured_outputs": {"json": SCHEMA}}, BY_SCHEMA),
    ({"guided_regex": "a+"}, BY_REGEX),
    ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, BY_SCHEMA),
    ({"response_format": {"type": "json_object", "value": SCHEMA}}, BY_SCHEMA),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, BY_SCHEMA),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, BY_SCHEMA),
    ({"response_format": {"type": "json_schema", **NAMED}}, BY_SCHEMA),
    ({"response_format": {"type": "regex", "pattern": "a+"}}, BY_REGEX),
    ({"response_format": {"type": "regex", "value": "a+"}}, BY_REGEX),
    ({"response_format": {"type": "grammar", "grammar": GBNF}}, BY_GBNF),
    ({"grammar": "", "regex": "", "ebnf": "", "format": ""}, None),
    ({"format": "text", "response_format": {"type": "text"}}, None),
]
LIMITS = (
    "max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "n_predict",
    "num_predict",
)  # fmt: skip
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"extra_body": {"guided_json": SCHEMA}}, "extra_body.guided_json", "'guided_json' outside"),
    ({"options": {"num_predict": 5}}, "options.num_predict", "'num_predict' outside"),
    ({"options": {"stop": ["a"]}}, "options.stop", "'stop' outside"),
    ({"sampling_params": {"regex": "a"}}, "sampling_params.regex", "'regex' outside"),
    ({"nvext": {"guided_choice": ["a"]}}, "nvext.guided_choice", "'guided_choice' outside"),
    ({"nvext": {"ignore_eos": True}}, "nvext.ignore_eos", "'nvext' is not read"),
    ({"extra_body": {"options": {"format": "json"}}}, "extra_body.options.format", "'extra_body.o"),
    ({"generationConfig": {"maxOutputTokens": 5}}, "generationConfig.maxOutputTokens", "max_tok"),
    ({"max_length": 5}, "max_length", "max_tokens"),
    ({"maxNewTokens": 5}, "maxNewTokens", "max_tokens"),
    ({"thinking_budget": 5}, "thinking_budget", "max_tokens"),
    ({"min_length": 5}, "min_length", "min_tokens"),
    ({"guidance": "x"}, "guidance", "structured_outputs"),
    ({"guided_decoding": {"json": SCHEMA}}, "guided_decoding.json", "structured_outputs"),
    ({"grammar_string": GBNF}, "grammar_string", "structured_outputs"),
    ({"response_schema": SCHEMA}, "response_schema", "structured_outputs"),
    ({"json_mode": True}, "json_mode", "structured_outputs"),
    ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size", "repetition_penalty"),
    ({"output_length": 5}, "output_length", "max_tokens"),
    ({"stop_regex": "a"}, "stop_regex", "'stop'"),
    ({"banned_strings": ["a"]}, "banned_strings", "bad_words"),
    ({"logits_processors": ["a"]}, "logits_processors", "logit_bias"),
]
HARMLESS: dict[str, Any] = {
    "guided_decoding_backend": "auto",
    "guided_whitespace_pattern": " ?",
    "max_input_tokens": 5,
    "max_retries": 2,
    "json_mode": False,
    "max_length": -1,
    "thinking_budget": 0,
    "extra_body": {"top_a": 1, "max_length": None},
    "options": {"num_ctx": 4096},
    "schema": {},
}


@pytest.fixture
def api(running_api: LiveApi) -> Iterator[LiveApi]:
    running_api.reset()
    yield running_api
    running_api.generator.wait_idle()


def ask(api: LiveApi, path: str, fields: dict[str, Any]) -> httpx.Response:
    return api.post(path, {"model": MODEL, **BODIES[path], **fields})


def sampling_for(api: LiveApi, path: str, fields: dict[str, Any]) -> SamplingParams:
    response = ask(api, path, fields)
    assert response.status_code == 200, response.text
    assert "x-baton-ignored" not in response.headers
    return api.generator.requests[-1].sampling


@every_endpoint
def test_every_server_s_constraint_is_served(api: LiveApi, path: str) -> None:
    for fields, grammar in some(CONSTRAINTS, 8):
        assert sampling_for(api, path, fields).grammar == grammar, fields


def test_each_api_has_its_own_name_of_a_format(api: LiveApi) -> None:
    schema = {"type": "json_schema", **NAMED}
    for path, fields in (
        (RESPONSES, {"text": {"format": schema}}),
        (RESPONSES, {"text": {"format": {"type": "json_object", "schema": SCHEMA}}}),
        (MESSAGES, {"output_config": {"format": schema}}),
        (MESSAGES, {"output_format": schema}),
    ):
        assert sampling_for(api, path, fields).grammar == BY_SCHEMA
    for path, fields in (
        (CHAT, {"text": {"format": schema}}),
        (RESPONSES, {"output_config": {"format": schema}}),
    ):
        assert ask(api, path, fields).status_code == 400


@every_endpoint
def test_every_server_s_limit_is_served(api: LiveApi, path: str) -> None:
    api.says("one two three")
    for name in LIMITS:
        fields = {"max_tokens": None, name: 3}
        if path == MESSAGES:
            fields["max_tokens"] = 3
        assert sampling_for(api, path, fields).max_tokens == 3
    no_limits: list[dict[str, object]] = [{}, {"n_predict": -1}]
    no_limits += [{"max_tokens": -1, "max_completion_tokens": -1}] if path == CHAT else []
    limits = {sampling_for(api, path, each).max_tokens for each in no_limits}
    assert len(limits) == 1
    assert min(limits) > 3
    differ = ask(api, path, {"max_tokens": 5, "max_new_tokens": 4})
    assert "'max_tokens' and 'max_new_tokens' differ" in differ.json()["error"]["message"]
    assert sampling_for(api, path, {"min_new_tokens": 2}).min_tokens == 2


@every_endpoint
def test_every_server_s_stops_are_served(api: LiveApi, path: str) -> None:
    for fields in (
        {"stop": "two"},
        {"stop_sequences": ["two"]},
        {"stop": ["zz"], "stop_sequences": ["two"]},
    ):
        api.says("one two three")
        response = ask(api, path, fields)
        assert "one " in response.text
        assert "three" not in response.text


@every_endpoint
def test_two_constraints_exclude_each_other(api: LiveApi, path: str) -> None:
    for one in ({"response_format": {"type": "json_object"}}, {"grammar": GBNF}):
        fields = {"regex": GBNF, **one}
        assert "exclude each other" in ask(api, path, fields).json()["error"]["message"], one


@every_endpoint
def test_one_constraint_under_several_names_counts_once(api: LiveApi, path: str) -> None:
    by_format = {"response_format": {"type": "json_schema", "json_schema": NAMED}}
    reordered = dict(reversed(SCHEMA.items()))
    given = {"json_schema": SCHEMA, "guided_json": json.dumps(reordered), "format": SCHEMA}
    assert sampling_for(api, path, {**by_format, **given}).grammar == BY_SCHEMA
    strict = {"type": "json_schema", "json_schema": {**NAMED, "strict": True}}
    alone = sampling_for(api, path, {"response_format": strict}).grammar
    assert alone != BY_SCHEMA
    assert sampling_for(api, path, {"response_format": strict, **given}).grammar == alone
    given["format"] = strict["json_schema"]
    assert sampling_for(api, path, {**by_format, **given}).grammar == alone
    assert sampling_for(api, path, {"regex": "a+", "guided_regex": "a+"}).grammar == BY_REGEX


@every_endpoint
def test_schemas_that_only_python_holds_to_be_equal_exclude_each_other(
    api: LiveApi, path: str
) -> None:
    response = ask(api, path, {"json_schema": {"const": 1}, "format": {"const": True}})
    assert response.status_code == 400
    assert "'format' and 'json_schema' exclude each other" in response.json()["error"]["message"]


@every_endpoint
def test_a_constraint_that_is_not_served_is_refused(api: LiveApi, path: str) -> None:
    for fields, name, instead in some(REFUSED, 6):
        response = ask(api, path, fields)
        assert response.status_code == 400, fields
        message = response.json()["error"]["message"]
        assert f"'{name}' would constrain the answer" in message
        assert instead in message
    assert api.generator.requests == []


@every_endpoint
def test_what_constrains_nothing_is_ignored(api: LiveApi, path: str) -> None:
    response = ask(api, path, HARMLESS)
    assert response.status_code == 200, response.text
    assert set(response.headers["x-baton-ignored"].split(", ")) == set(HARMLESS)


def test_the_words_of_a_name_tell(api: LiveApi) -> None:
    refused = (
        "max_gen_len maxTokens MAX_NEW_TOKENS max_time gbnf_grammar outputJSONSchema eosTokenId"
    )
    assert all(replacement(each) for each in refused.split())
    passed = (
        "max max_prompt_tokens maxContextTokens metadata json_indent num_ctx top_a total_tokens"
    )
    assert not any(replacement(each) for each in passed.split())


# -- the names of Baton's own other endpoints ---------------------------------------------------

TAKEN = {each.path: each.body for each in OPERATIONS if each.body is not None}
OWN_NAMES = sorted(
    {field.alias or name for body in TAKEN.values() for name, field in body.model_fields.items()}
)


@pytest.mark.parametrize("path", TAKEN)
def test_no_field_of_another_endpoint_is_a_slip(api: LiveApi, path: str) -> None:
    body = {"model": MODEL, **BODIES.get(path, {"tokens": [1]})}
    for name in some(OWN_NAMES, 30):
        message = api.post(path, {**body, name: "x"}).text
        assert "did you mean" not in message


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (MESSAGES, {"seed": 7, "min_tokens": 2, "frequency_penalty": 0.5, "min_p": 0.1}),
        (RESPONSES, {"seed": 7, "min_tokens": 2, "frequency_penalty": 0.5, "min_p": 0.1}),
        (RESPONSES, {"top_k": 3, "logit_bias": {"7": 2}, "allowed_token_ids": [5, 7]}),
        (MESSAGES, {"repetition_penalty": 1.5, "logit_bias": {"7": 2}, "bad_words": ["one"]}),
        (RESPONSES, {"presence_penalty": 1, "stop_token_ids": [9], "ignore_eos": True}),
        (MESSAGES, {"presence_penalty": 1, "stop_token_ids": [9], "allowed_token_ids": [5, 7]}),
    ],
)
def test_sampling_is_the_same_in_every_api(api: LiveApi, path: str, fields: dict[str, Any]) -> None:
    asked = fields | {"max_tokens": 20, "seed": 7}
    assert sampling_for(api, path, asked) == sampling_for(api, CHAT, asked)


@every_endpoint
def test_a_top_p_of_0_is_greedy(api: LiveApi, path: str) -> None:
    sampling = sampling_for(api, path, {"top_p": 0, "temperature": 1})
    assert (sampling.temperature, sampling.top_p) == (0.0, 1.0)
