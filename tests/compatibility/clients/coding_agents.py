"""Bodies in the shapes that Claude Code and Codex send, whole conversations with calls."""

import json
import os

import httpx

client = httpx.Client(base_url=os.environ["BATON_TEST_URL"], timeout=120)
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
BILLING = "x-anthropic-billing-header: cc_version=2.1.9; cc_entrypoint=cli; cch={};"
CACHED = {"cache_control": {"type": "ephemeral"}}
CLAUDE = {
    "model": "demo_model",
    "max_tokens": 200,
    "stream": True,
    "temperature": 1,
    "metadata": {"user_id": json.dumps({"device_id": "d", "session_id": "s"})},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "tools": [
        {"name": "Read", "description": "Reads a file.", "input_schema": SCHEMA | {
            "$schema": "https://json-schema.org/draft/2020-12/schema"}},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Read the file", **CACHED}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I read it.", "signature": ""},
                {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a"},
                 "caller": {"type": "direct"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "text", **CACHED},
            ],
        },
    ],
}  # fmt: skip
HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
}
seen = []
for number in ("1a2b3", "4c5d6"):
    system = [BILLING.format(number), "You are a coding agent. " * 40]
    body = {**CLAUDE, "system": [{"type": "text", "text": each, **CACHED} for each in system]}
    answer = client.post("/v1/messages?beta=true", json=body, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    assert "message_stop" in answer.text, answer.text
    start = json.loads(answer.text.split("data: ")[-2].split("\n")[0])
    seen.append(start["usage"]["cache_read_input_tokens"])
    assert "tools[web_search_20250305]" in answer.headers["x-baton-ignored"]
assert seen[1] > 200, f"cached of the second prompt: {seen[1]} tokens"
counted = {name: value for name, value in CLAUDE.items() if name in ("model", "messages", "tools")}
assert client.post("/v1/messages/count_tokens?beta=true", json=counted).status_code == 200
assert client.head("/").status_code == 200

CODEX = {
    "model": "demo_model",
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}],
         "encrypted_content": None},
        {"type": "function_call", "name": "shell", "arguments": '{"path": "a"}', "call_id": "c1"},
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "d", "strict": False,
         "parameters": SCHEMA},
        {"type": "custom", "name": "apply_patch", "description": "d",
         "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}},
        {"type": "namespace", "name": "mcp__a", "description": "d", "tools": []},
        {"type": "web_search", "external_web_access": True},
        {"type": "local_shell"},
        {"type": "image_generation", "output_format": "png"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "i"},
}  # fmt: skip
answer = client.post("/v1/responses", json=CODEX, headers={"accept": "text/event-stream"})
assert answer.status_code == 200, answer.text
assert "response.completed" in answer.text or "response.incomplete" in answer.text, answer.text
long = CODEX | {"input": "word " * 9000}
error = client.post("/v1/responses", json=long).json()["error"]
assert error["code"] == "context_length_exceeded"
