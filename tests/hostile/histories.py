"""Attacks by histories of other services: every kind of part, call, item and block."""

from __future__ import annotations

from tests.hostile.bodies import CACHED, user
from tests.hostile.sizes import Body, Field, Sizes

_TEXT: Body = {"type": "text", "text": "x"}
_THOUGHT: Body = {"type": "thinking", "thinking": [_TEXT]}
_REFUSAL: Body = {"type": "refusal", "refusal": "r"}


def _repeated(some: list[Body], num_parts: int, sizes: Sizes) -> list[Body]:
    """As many of these entries, which have `num_parts` strings and objects together, as allowed."""
    return some * max(1, sizes.many(num_parts) // len(some))


def other_messages(sizes: Sizes) -> list[Body]:
    """Refusals, and calls of custom tools."""
    custom = {"id": "c", "type": "custom", "index": 0, "custom": {"name": "f", "input": "x"}}
    said: Body = {"role": "assistant", "content": [_TEXT, _REFUSAL, _THOUGHT], "refusal": "r"}
    said |= {"audio": {"id": "a"}, "tool_calls": [custom]}
    result: Body = {"role": "tool", "tool_call_id": "c", "content": []}
    return [*_repeated([said, result], 50, sizes), *user("x")]


def other_items(sizes: Sizes) -> list[Body]:
    """Calls of custom and built-in tools, calls that a service ran, and items left out."""
    shown = {"id": "i", "status": "completed"}
    some: list[Body] = [
        {"type": "message", "role": "assistant", "content": [_REFUSAL]},
        {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x", **shown},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "x"},
        {"type": "shell_call", "call_id": "d", "action": {"commands": ["ls"]}, **shown},
        {"type": "shell_call_output", "call_id": "d", "output": [{"stdout": "x"}], **shown},
        {"type": "apply_patch_call", "call_id": "e", "operation": {"path": "x"}, **shown},
        {"type": "apply_patch_call_output", "call_id": "e", **shown},
        {"type": "program", "call_id": "p", "code": "1", **shown},
        {"type": "program_output", "call_id": "p", "result": "1", **shown},
        {"type": "mcp_call", "name": "f", "arguments": "{}", "output": "x", "error": [1], **shown},
        {"type": "code_interpreter_call", "code": "1", "outputs": [{"logs": "x"}], **shown},
        {"type": "file_search_call", "queries": ["q"], "results": [{"text": "x"}], **shown},
        {"type": "compaction", "encrypted_content": "e"},
    ]
    return [*_repeated(some, 200, sizes), *user("x")]


def other_blocks(sizes: Sizes) -> list[Body]:
    """Documents, search results, and tools of the service with what they gave."""
    plain = {"type": "text", "media_type": "text/plain", "data": "x"}
    whole = {"type": "content", "content": [_TEXT]}
    cited = {"citations": {"enabled": True}, **CACHED}
    read: list[Body] = [
        {"type": "document", "title": "t", "context": "c", "source": plain, **cited},
        {"type": "document", "source": whole},
        {"type": "search_result", "title": "t", "source": "s", "content": [_TEXT], **cited},
        {"type": "tool_reference", "tool_name": "f", **CACHED},
        {"type": "compaction", "content": "x", "encrypted_content": "e", **CACHED},
        {"type": "container_upload", "file_id": "f"},
    ]
    ran = {"caller": {"type": "server"}, **CACHED}
    result = {"type": "mcp_tool_result", "tool_use_id": "s", "is_error": True, **ran}
    made: list[Body] = [
        {"type": "server_tool_use", "id": "s", "name": "f", "input": {"a": [1]}, **ran},
        {**result, "content": [_TEXT, {"title": "t", "encrypted_content": "e"}]},
    ]
    return [
        *user(_repeated(read, 160, sizes)),
        {"role": "assistant", "content": _repeated(made, 60, sizes)},
        *user("x"),
    ]


def deep_results(sizes: Sizes) -> list[Body]:
    """A result of a service's tool that nests as deeply as JSON may."""
    content: object = "x"
    for _ in range(60):
        content = [{"content": content}]
    result = {"type": "web_search_tool_result", "tool_use_id": "s", "content": content}
    use = {"type": "server_tool_use", "id": "s", "name": "f", "input": {}}
    return [*user("x"), {"role": "assistant", "content": [use, *[result] * sizes.many(300)]}]


CHAT_HISTORIES: dict[str, Field] = {
    "other services' messages": lambda sizes: {"messages": other_messages(sizes)},
}
ITEM_HISTORIES: dict[str, Field] = {
    "other services' items": lambda sizes: {"input": other_items(sizes)},
    "references to items": lambda sizes: {
        "input": [{"type": "item_reference", "id": f"msg_{i:032x}_0"} for i in range(sizes.many(5))]
    },
}
BLOCK_HISTORIES: dict[str, Field] = {
    "other services' blocks": lambda sizes: {"messages": other_blocks(sizes)},
    "deep results": lambda sizes: {"messages": deep_results(sizes)},
}
