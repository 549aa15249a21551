"""Earlier calls and their results, also of tools that are no functions."""

from __future__ import annotations

import json

import pytest

from gateway.chat.conversation import ToolCall
from protocol.errors import InvalidRequest
from tests.unit.gateway.api.read_histories import of_blocks, of_chat, of_items, refusal


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
