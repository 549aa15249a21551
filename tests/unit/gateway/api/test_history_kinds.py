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
from gateway.chat.conversation import Message, ToolCall
from protocol.errors import InvalidRequest
from tests.unit.gateway.api.typed_samples import kind_of, members, samples

HI = {"role": "user", "content": "Hi"}
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


def read(schema: Any, convert: Any, **fields: Any) -> tuple[tuple[Message, ...], list[str]]:
    """The messages of a body, and the names of what is left out of it."""
    body = json.dumps({"model": "m", **fields}).encode()
    request, ignored = fields_of(schema, body, False)
    return convert(request).messages, list(ignored)


def refusal(read_one: Any, *entry: Any) -> InvalidRequest | None:
    """Why a history is refused, if it is."""
    try:
        read_one(*entry)
    except InvalidRequest as error:
        return error
    return None


def check_refusal(error: InvalidRequest, entry: Any, param: str) -> None:
    """A history is refused for the sake of a file alone."""
    assert has_file(entry), (entry, error.message)
    assert REFUSAL in error.message
    assert error.param is not None
    assert error.param.startswith(param)


def of_chat(*messages: Any) -> tuple[tuple[Message, ...], list[str]]:
    return read(ChatRequest, lambda request: request.conversation, messages=[HI, *messages])


def of_blocks(role: str, *blocks: Any) -> tuple[tuple[Message, ...], list[str]]:
    messages = [HI, {"role": role, "content": list(blocks)}, HI]
    return read(MessagesRequest, anthropic.conversation_of, messages=messages, max_tokens=5)


def of_items(*items: Any) -> tuple[tuple[Message, ...], list[str]]:
    return read(ResponsesRequest, responses.conversation_of, input=[HI, *items, HI])


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


def test_calls_without_ids_are_answered_in_their_order():
    """Also where some results have ids, and where there are more results than calls."""
    function = {"name": "f", "arguments": ""}
    calls = [{"function": function}, {"function": function, "id": None}, {"function": function}]
    calls.append({"type": "custom", "custom": {"name": "g", "input": "x"}, "id": ""})
    results = [{"role": "tool", "content": str(number)} for number in range(5)]
    messages, _ = of_chat({"role": "assistant", "tool_calls": calls}, *results)
    ids = [call.id for call in messages[1].tool_calls]
    assert len(set(ids)) == 4
    assert [each.tool_call_id for each in messages[2:]] == [*ids, None]
    results[0]["tool_call_id"] = ids[1]
    messages, _ = of_chat({"role": "assistant", "tool_calls": calls}, *results[:3])
    assert [each.tool_call_id for each in messages[2:]] == [ids[1], ids[0], ids[2]]


@pytest.mark.parametrize("none", [{}, {"arguments": None}])
def test_a_call_without_arguments_has_none(none):
    """Nor without a type, or with null for one."""
    function = {"name": "f", **none}
    for call in ({"function": function}, {"type": None, "function": function}):
        messages, _ = of_chat({"role": "assistant", "tool_calls": [{"id": "c", **call}]})
        assert messages[1].tool_calls == (ToolCall("c", "f", "{}"),)
    messages, _ = of_chat({"role": "assistant", "function_call": function})
    assert messages[1].tool_calls[0].arguments == "{}"
    asked = {"type": None, "role": "user", "content": "Hi"}
    messages, _ = of_items(asked, {"type": "function_call", "call_id": "c", **function})
    assert (messages[1].content, messages[2].tool_calls) == ("Hi", (ToolCall("c", "f", "{}"),))


def test_arguments_may_be_an_object():
    """As clients keep them that speak Ollama's API, too."""
    arguments = {"city": "Bern", "à": [1.5, None]}
    function = {"name": "f", "arguments": arguments}
    messages, _ = of_chat({"role": "assistant", "tool_calls": [{"id": "c", "function": function}]})
    assert json.loads(messages[1].tool_calls[0].arguments) == arguments
    messages, _ = of_chat({"role": "assistant", "function_call": function})
    assert json.loads(messages[1].tool_calls[0].arguments) == arguments
    messages, _ = of_items({"type": "function_call", "call_id": "c", **function})
    assert json.loads(messages[1].tool_calls[0].arguments) == arguments
    error = refusal(
        of_items, {"type": "function_call", "call_id": "c", "name": "f", "arguments": 1}
    )
    assert error is not None
    assert (error.param, error.message) == (
        "input[1].arguments",
        "'input[1].arguments': input should be a string or an object",
    )


def test_text_parts_may_have_the_names_of_responses():
    parts = [{"type": kind, "text": kind} for kind in ("text", "input_text", "output_text")]
    messages, ignored = of_chat({"role": "user", "content": parts})
    assert messages[1].parts == ("text", "input_text", "output_text")
    assert ignored == []


CALLS = [
    (
        {"type": "custom_tool_call", "call_id": "c", "name": "edit", "input": "a"},
        "edit",
        {"input": "a"},
    ),
    (
        {
            "type": "local_shell_call",
            "id": "i",
            "call_id": "c",
            "status": "completed",
            "action": {"command": ["ls"]},
        },
        "local_shell",
        {"command": ["ls"]},
    ),
    (
        {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
        "shell",
        {"commands": ["ls"]},
    ),
    (
        {
            "type": "apply_patch_call",
            "call_id": "c",
            "status": "completed",
            "operation": {"path": "x"},
        },
        "apply_patch",
        {"path": "x"},
    ),
    ({"type": "program", "id": "p", "call_id": "c", "code": "1"}, "program", {"code": "1"}),
]
OUTPUTS = [
    (
        {
            "type": "custom_tool_call_output",
            "call_id": "c",
            "output": [{"type": "input_text", "text": "done"}],
        },
        "done",
    ),
    ({"type": "local_shell_call_output", "id": "c", "output": "done"}, "done"),
    (
        {
            "type": "shell_call_output",
            "call_id": "c",
            "output": [{"stdout": "a", "stderr": "b", "outcome": {"type": "timeout"}}],
        },
        "a\nb",
    ),
    ({"type": "apply_patch_call_output", "call_id": "c", "status": "failed"}, "failed"),
    (
        {"type": "program_output", "id": "o", "call_id": "c", "result": "2", "status": "completed"},
        "2",
    ),
]


@pytest.mark.parametrize(("call", "output"), list(zip(CALLS, OUTPUTS, strict=True)))
def test_calls_of_tools_that_are_no_functions_become_calls(call, output):
    (item, name, arguments), (result, said) = call, output
    messages, ignored = of_items(item, result)
    made = messages[1].tool_calls[0]
    assert (made.id, made.name, json.loads(made.arguments)) == ("c", name, arguments)
    assert (messages[2].role, messages[2].content, messages[2].tool_call_id) == ("tool", said, "c")
    assert ignored == []


def test_calls_that_another_service_ran_become_calls_with_results():
    call = {
        "type": "mcp_call",
        "id": "m",
        "server_label": "s",
        "name": "f",
        "arguments": '{"a": 1}',
    }
    code = {"type": "code_interpreter_call", "id": "i", "code": "1+1", "status": "completed"}
    messages, ignored = of_items(
        {**call, "output": "found"},
        {**code, "outputs": [{"type": "logs", "logs": "2"}, {"type": "image", "url": "x"}]},
        {"type": "message", "role": "assistant", "content": "Two"},
    )
    assert [each.role for each in messages[1:-1]] == ["assistant", "tool"] * 2 + ["assistant"]
    assert [each.content for each in messages[1:-1]] == ["", "found", "", "2", "Two"]
    assert json.loads(messages[3].tool_calls[0].arguments) == {"code": "1+1"}
    assert set(ignored) == {"input[].server_label", "input[].outputs"}
    assert "input[mcp_call]" in of_items(call)[1]


def test_tools_of_anthropics_service_become_calls_with_results():
    use = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}}
    page = {"type": "web_search_result", "title": "T", "url": "u", "encrypted_content": "zzz"}
    messages, ignored = of_blocks(
        "assistant",
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": "I search."},
        use,
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [page]},
        {"type": "text", "text": "Found."},
        {"type": "tool_use", "id": "t", "name": "f", "input": {}},
        {"type": "redacted_thinking", "data": "zzz"},
    )
    first, result, second = messages[1:-1]
    assert (first.reasoning, first.content, first.tool_calls[0].name) == (
        "hm",
        "I search.",
        "web_search",
    )
    assert (result.role, result.content, result.tool_call_id) == ("tool", "T\nu", "s")
    assert (second.content, second.tool_calls[0].name) == ("Found.", "f")
    assert set(ignored) == {"messages[].content[redacted_thinking]", "messages[].content[].content"}
    alone, _ = of_blocks("assistant", use)
    assert [each.role for each in alone[1:-1]] == ["assistant", "tool"]


def test_text_in_a_tool_result_is_read():
    document = {
        "type": "document",
        "title": "D",
        "context": "C",
        "source": {"type": "text", "media_type": "text/plain", "data": "body"},
    }
    found = {
        "type": "search_result",
        "title": "T",
        "source": "s",
        "content": [{"type": "text", "text": "x"}],
    }
    content = [document, found, {"type": "tool_reference", "tool_name": "f"}]
    result = {"type": "tool_result", "tool_use_id": "t", "content": content}
    messages, ignored = of_blocks("user", result)
    assert messages[1].parts == ("D\nC\nbody", "T\ns\nx", "f")
    assert ignored == []
    with pytest.raises(InvalidRequest) as caught:
        of_blocks("user", {**result, "content": [document, {"type": "image", "source": {}}]})
    assert caught.value.param == "messages[1].content[0].content[1].type"


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
