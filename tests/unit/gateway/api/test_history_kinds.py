"""Every kind of item, block, part and call that OpenAI's and Anthropic's packages have types for is
accepted in a history: as text, as a call, or left out and named. What holds an image or a file is
refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types.beta.beta_content_block_param import BetaContentBlockParam
from anthropic.types.content_block_param import ContentBlockParam
from openai.types.chat.chat_completion_message_param import ChatCompletionMessageParam
from openai.types.responses.response_input_item_param import ResponseInputItemParam

from gateway.api.anthropic import conversation as anthropic
from gateway.api.anthropic.request import MessagesRequest
from gateway.api.body_reader import fields_of
from gateway.api.openai.chat_request import ChatRequest
from gateway.api.openai_responses import conversation as responses
from gateway.api.openai_responses.kept_items import items_of, kept_json, read_items
from gateway.api.openai_responses.request import ResponsesRequest
from protocol.errors import InvalidRequest
from tests.unit.gateway.api.read_histories import HI, of_blocks, of_chat, of_items, read, refusal
from tests.unit.gateway.api.typed_samples import kind_of, members, samples

FILES = {
    "input_image", "input_file", "input_audio", "image_url", "file", "image", "base64", "url",
    "computer_screenshot", "computer_call_output",
}  # fmt: skip
REFUSAL = "is not supported: the model reads text alone"
BLOCKS = members(ContentBlockParam) + members(BetaContentBlockParam)
ITEMS = members(ResponseInputItemParam)
CHAT_MESSAGES = members(ChatCompletionMessageParam)


def has_file(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(has_file, value))
    if not isinstance(value, dict):
        return False
    return str(value.get("type")) in FILES or any(map(has_file, value.values()))


def check_refusal(error: InvalidRequest, entry: Any, param: str) -> None:
    """A history is refused for the sake of a file alone."""
    assert has_file(entry), (entry, error.message)
    assert REFUSAL in error.message
    assert error.param is not None
    assert error.param.startswith(param)


def test_the_packages_have_many_kinds():
    """So that the lists below are not empty."""
    assert len(BLOCKS) > 30
    assert len(ITEMS) > 25
    assert len(CHAT_MESSAGES) == 6


@pytest.mark.parametrize("type_", ITEMS, ids=lambda each: each.__name__)
def test_every_item_is_read_or_named_or_refused_for_its_file(type_):
    for item in samples(type_):
        kind = item.get("type") or "item_reference"
        if kind == "item_reference":
            continue  # `test_item_references` has them
        error = refusal(of_items, item)
        if error is not None:
            check_refusal(error, item, "input[1]")
            continue
        messages, ignored = of_items(item)
        is_named = f"input[{kind}]" in ignored
        assert (len(messages) > 2) != is_named, (item, messages, ignored)


@pytest.mark.parametrize("type_", BLOCKS, ids=lambda each: each.__name__)
def test_every_block_is_read_or_named_or_refused_for_its_file(type_):
    kind, num_read = kind_of(type_), 0
    for block in samples(type_):
        errors = []
        for role in ("user", "assistant"):
            error = refusal(of_blocks, role, block)
            if error is not None:
                errors.append(error)
                continue
            messages, ignored = of_blocks(role, block)
            num_read += 1
            is_read = any(
                each.content or each.reasoning or each.tool_calls or each.role == "tool"
                for each in messages[1:-1]
            )
            is_named = any(each.startswith("messages[].content") for each in ignored)
            assert is_read or is_named or kind == "compaction", (block, messages)
        if len(errors) == 2:
            for error in errors:
                check_refusal(error, block, "messages[1].content[0]")
    assert (num_read == 0) == (kind == "image")


@pytest.mark.parametrize("type_", CHAT_MESSAGES, ids=lambda each: each.__name__)
def test_every_chat_message_is_read_or_refused_for_its_file(type_):
    num_read = 0
    for message in samples(type_):
        error = refusal(of_chat, message)
        if error is None:
            num_read += 1
        elif message.get("content") is not None:
            check_refusal(error, message, "messages[1].content[0]")
    assert num_read


@pytest.mark.parametrize("type_", ITEMS, ids=lambda each: each.__name__)
def test_items_that_are_kept_are_read_as_they_were(type_):
    for item in samples(type_):
        if refusal(of_items, item) is not None:
            continue
        body = json.dumps({"model": "m", "input": [HI, item]}).encode()
        request, _ = fields_of(ResponsesRequest, body, False)
        again = request.model_copy(
            update={"input": read_items(kept_json(b"", items_of(request.input)))}
        )
        assert responses.conversation_of(again) == responses.conversation_of(request)


def test_text_parts_may_have_the_names_of_responses():
    parts = [{"type": kind, "text": kind} for kind in ("text", "input_text", "output_text")]
    messages, ignored = of_chat({"role": "user", "content": parts})
    assert messages[1].parts == ("text", "input_text", "output_text")
    assert ignored == []


def test_a_kind_that_is_nearly_one_is_refused():
    for read_one, entry, meant in (
        (of_items, {"type": "massage", "role": "user", "content": "x"}, "message"),
        (lambda block: of_blocks("user", block), {"type": "tool_results"}, "tool_result"),
    ):
        with pytest.raises(InvalidRequest, match=f"did you mean '{meant}'"):
            read_one(entry)
    named, ignored = of_items({"type": "hologram", "light": 1})
    assert (len(named), ignored) == (2, ["input[hologram]"])


def test_a_history_in_which_nothing_can_be_read_is_refused():
    with pytest.raises(InvalidRequest) as caught:
        read(
            ResponsesRequest,
            responses.conversation_of,
            input=[{"type": "compaction", "encrypted_content": "x"}],
        )
    assert caught.value.param == "input"
    upload = [{"role": "user", "content": [{"type": "container_upload", "file_id": "f"}]}]
    with pytest.raises(InvalidRequest) as caught:
        read(MessagesRequest, anthropic.conversation_of, messages=upload, max_tokens=5)
    assert caught.value.param == "messages"


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PARTS = [{"type": "text", "text": "I"}, {"type": "refusal", "refusal": "cannot"}]


@pytest.mark.parametrize(
    ("fields", "content", "reasoning"),
    [
        ({"content": None}, "", None),
        ({}, "", None),
        ({"content": ""}, "", None),
        ({"content": []}, "", None),
        ({"content": [], "tool_calls": [CALL]}, "", None),
        ({"content": None, "tool_calls": []}, "", None),
        ({"content": "x", "tool_calls": None, "function_call": None, "name": "n"}, "x", None),
        ({"content": None, "reasoning_content": "hm"}, "", "hm"),
        ({"content": None, "reasoning": "hm"}, "", "hm"),
        ({"content": None, "refusal": "No"}, "No", None),
        ({"content": "", "refusal": "No"}, "No", None),
        ({"content": "Well", "refusal": "No"}, "Well\nNo", None),
        ({"content": PARTS}, "I\ncannot", None),
        ({"content": [{"type": "thinking", "thinking": "hm"}, PARTS[0]]}, "I", "hm"),
        ({"content": [{"type": "thinking", "thinking": PARTS[:1]}]}, "", "I"),
        ({"content": [{"type": "output_text", "text": "x"}]}, "x", None),
        ({"content": "x", "refusal": None, "audio": None, "annotations": []}, "x", None),
    ],
)
def test_an_assistants_message_as_others_write_it(fields, content, reasoning):
    messages, ignored = of_chat({"role": "assistant", **fields}, HI)
    assert (messages[1].content, messages[1].reasoning) == (content, reasoning)
    assert ignored == []


def test_refusals_of_responses_are_text():
    parts = [{"type": "output_text", "text": "I", "annotations": []}, PARTS[1]]
    messages, ignored = of_items(
        {"type": "message", "id": "m", "role": "assistant", "content": parts}
    )
    assert (messages[1].content, ignored) == ("I\ncannot", [])


def test_audio_of_an_answer_is_named():
    messages, ignored = of_chat({"role": "assistant", "content": None, "audio": {"id": "a"}}, HI)
    assert (messages[1].content, ignored) == ("", ["messages[].audio"])


def test_results_may_be_empty():
    call = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    messages, _ = of_chat(call, {"role": "function", "name": "f", "content": None})
    assert messages[2].content == ""
    messages, _ = of_chat({"role": "tool", "tool_call_id": "c", "content": []})
    assert messages[1].content == ""


@pytest.mark.parametrize("role", ["user", "system", "developer"])
@pytest.mark.parametrize("content", [None, []])
def test_what_is_asked_may_not_be_empty(role, content):
    error = refusal(of_chat, {"role": role, "content": content})
    assert error is not None
    assert error.param == "messages[1].content"


def test_only_the_assistant_refuses():
    error = refusal(of_chat, {"role": "user", "content": "x", "refusal": "No"})
    assert error is not None
    assert error.param == "messages[1].refusal"


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "auto"},
        {"tool_choice": "none", "tools": []},
        {"tool_choice": "auto", "tools": [], "parallel_tool_calls": False},
        {"parallel_tool_calls": True},
        {"function_call": "auto", "functions": []},
    ],
)
def test_choices_of_tools_mean_nothing_without_tools(fields):
    messages, ignored = read(ChatRequest, lambda asked: asked.conversation, messages=[HI], **fields)
    assert (len(messages), ignored) == (1, [])
