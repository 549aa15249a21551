"""Fields of other APIs that say how long a prompt should stay cached become hints for workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.text.tokenizer import Tokenizer
from protocol.retention import RetentionHint
from tests.unit.gateway.api_harness import MODEL, LiveApi

HOUR = RetentionHint(3600)
ASK = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def running_api(tools_checkpoint: Path, tools_tokenizer: Tokenizer) -> Iterator[LiveApi]:
    with LiveApi(tools_checkpoint, tools_tokenizer) as live:
        yield live


def hint_of(
    api: LiveApi, path: str, headers: dict[str, str] | None = None, **fields: Any
) -> RetentionHint | None:
    """The hint of the request that this one becomes."""
    api.generator.requests.clear()
    body = {"model": MODEL, "max_tokens": 20} | fields
    if path == "/v1/responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    answer = api.http.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return api.generator.requests[0].retention


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize(
    ("asked", "hint"),
    [("24h", HOUR), ("in-memory", None), ("in_memory", None), (None, None), ({"a": 1}, None)],
)
def test_prompt_cache_retention(
    api: LiveApi, path: str, asked: Any, hint: RetentionHint | None
) -> None:
    said = {"input": "Hi"} if path == "/v1/responses" else {"messages": ASK}
    assert hint_of(api, path, prompt_cache_retention=asked, **said) == hint


def cached(ttl: str | None = None) -> dict[str, Any]:
    return {"cache_control": {"type": "ephemeral"} | ({} if ttl is None else {"ttl": ttl})}


HI = {"type": "text", "text": "Hi", **cached("5m")}


def asking(block: dict[str, Any]) -> dict[str, Any]:
    """A request whose last message has this block, which may be the result of its only call."""
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    return {
        "messages": [
            *ASK,
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [block]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    }


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, None),
        (cached(), None),
        (cached("5m"), 300),
        ({"system": [{"type": "text", "text": "S", **cached("1h")}]}, 3600),
        ({"tools": [{"name": "f", "input_schema": {"type": "object"}, **cached("1h")}]}, 3600),
        (cached("5m") | {"system": [{"type": "text", "text": "S", **cached("1h")}]}, 3600),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "Hi", **cached("5m")}]}
                ]
            },
            300,
        ),
        (asking({"type": "tool_result", "tool_use_id": "t", "content": [HI]}), 300),
        (asking({"type": "document", "source": {"type": "content", "content": [HI]}}), 300),
        (asking({"type": "search_result", "source": "s", "title": "t", "content": [HI]}), 300),
    ],
    ids=[
        *("none", "no ttl", "request", "system", "tool", "the longest", "message"),
        *("tool result", "document", "search result"),
    ],
)
def test_cache_control(api: LiveApi, fields: dict[str, Any], seconds: int | None) -> None:
    hint = hint_of(api, "/v1/messages", **{"messages": ASK, **fields})
    assert hint == (None if seconds is None else RetentionHint(seconds))


def test_hints_of_baton_come_first(api: LiveApi) -> None:
    fields = {"messages": ASK, "prompt_cache_retention": "24h"}
    header = {"x-cache-retention": "60; priority=80"}
    path = "/v1/chat/completions"
    assert hint_of(api, path, header, **fields) == RetentionHint(60, 80)
    own = {"cache_retention": {"seconds": 20}}
    assert hint_of(api, path, header, **fields, **own) == RetentionHint(20)
