"""`/tokenize` and `/detokenize` as vLLM's clients use them."""

from __future__ import annotations

import pytest

from tests.unit.gateway.api_harness import MAX_CONTEXT, MODEL

TEXT = "Hello wörld 你好 😀"
MESSAGES = [{"role": "user", "content": "Say it"}]


def test_text_to_tokens_and_back(api):
    answer = api.post("/tokenize", {"model": MODEL, "prompt": TEXT}).json()
    ids = api.tokenizer.encode(TEXT, add_special_tokens=True)
    assert answer == {
        "count": len(ids),
        "max_model_len": MAX_CONTEXT,
        "tokens": ids,
        "token_strs": None,
    }
    assert api.post("/detokenize", {"tokens": ids}).json() == {"prompt": TEXT}


def test_the_vocabularys_own_spelling(api):
    answer = api.post("/tokenize", {"prompt": "a b", "return_token_strs": True}).json()
    assert "".join(answer["token_strs"]) == "aĠb"
    assert api.post("/tokenize", {"prompt": ""}).json()["tokens"] == []


def test_a_conversation_has_the_tokens_that_the_chat_endpoint_sends(api):
    tokens = api.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    api.chat("Say it")
    assert tokens == api.generator.requests[0].token_ids
    bare = api.post("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}).json()
    text = api.post("/detokenize", {"tokens": bare["tokens"]}).json()["prompt"]
    assert text == "<|start|>user\nSay it<|end|>\n"


def test_a_conversation_that_goes_on_in_its_last_message(api):
    messages = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    asked = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    tokens = api.post("/tokenize", asked).json()["tokens"]
    text = api.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert text == "<|start|>user\nSay it<|end|>\n<|start|>assistant\nIt is"


@pytest.mark.parametrize("name", ["prefix", "partial"])
def test_a_last_message_may_ask_by_itself_to_go_on(api, name: str):
    messages = [*MESSAGES, {"role": "assistant", "content": "It is", name: True}]
    asked = {"messages": messages}
    tokens = api.post("/tokenize", asked).json()["tokens"]
    text = api.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert text == "<|start|>user\nSay it<|end|>\n<|start|>assistant\nIt is"
    answer = api.post("/v1/chat/completions", {"model": MODEL, **asked})
    assert answer.status_code == 200
    assert "x-baton-ignored" not in answer.headers
    assert api.generator.requests[-1].token_ids == tokens


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        ([{"role": "user", "content": "a", "prefix": True}], {}, "messages[0].prefix"),
        (
            [{"role": "assistant", "content": "a", "partial": True}, *MESSAGES], {},
            "messages[0].partial",
        ),
        (
            [*MESSAGES, {"role": "assistant", "content": "a", "prefix": True}],
            {"add_generation_prompt": True}, "messages[1].prefix",
        ),
    ],
)  # fmt: skip
def test_only_the_last_answer_may_go_on(api, path: str, messages: list, fields: dict, param: str):
    answer = api.post(path, {"model": MODEL, "messages": messages, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert f"'{param}'" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "a", "promt": 1}, 400, "promt"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "x"}, 400, "chat_template"),
        (
            "/tokenize",
            {
                "messages": MESSAGES,
                "add_generation_prompt": True,
                "continue_final_message": True,
            },
            400,
            "continue_final_message",
        ),
        ("/tokenize", {"messages": [{"role": "tool", "content": "b"}]}, 400, "messages"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [9999]}, 400, "tokens"),
    ],
)  # fmt: skip
def test_bad_input(api, path, body, status, param):
    answer = api.post(path, body)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param
