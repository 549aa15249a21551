"""Answers read by the `openai` package's own types, and nothing in them that is not documented."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from tests.http_client import HTTP

DOCUMENTED = frozenset(
    {
        "token_ids",
        "prompt_token_ids",
        "reasoning_content",
        "reasoning",
        "stop_reason",
        "prompt_logprobs",
        "baton",
    }
)
"""Fields beyond OpenAI's, which docs/api.md describes."""

Parsed = TypeVar("Parsed", bound=BaseModel)


def parsed(kind: type[Parsed], document: Any) -> Parsed:
    """The document as one of OpenAI's types; fails for a field that is unknown or malformed."""
    answer = kind.model_validate_json(json.dumps(document), strict=True)
    _check_extra(answer, kind.__name__)
    return answer


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer's JSON, checked. Raises for an error of the server."""
    answer = HTTP.post(f"{url}{path}", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    parsed(ChatCompletion if "chat" in path else Completion, document)
    return document


def post_stream(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The JSON of all events, each checked."""
    events: list[dict[str, Any]] = []
    with HTTP.stream("POST", f"{url}{path}", json=body | {"stream": True}, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    for line in lines:
        events.append(json.loads(line.removeprefix("data: ")))
        if "chat" in path:
            parsed(ChatCompletionChunk, events[-1])
        else:
            parsed(Completion, _as_if_whole(events[-1]))
    return events


def _as_if_whole(event: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's type knows no null for the reason why a text ended, though its streams send it."""
    choices = [
        each | {"finish_reason": each["finish_reason"] or "stop"} for each in event["choices"]
    ]
    return event | {"choices": choices}


def _check_extra(value: object, where: str) -> None:
    if isinstance(value, list):
        for each in value:
            _check_extra(each, where)
    if not isinstance(value, BaseModel):
        return
    unknown = set(value.model_extra or ()) - DOCUMENTED
    assert not unknown, f"{where} has {unknown}"
    for name in type(value).model_fields:
        _check_extra(getattr(value, name), f"{where}.{name}")
