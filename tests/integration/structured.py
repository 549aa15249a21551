"""Asking a fleet for JSON of a schema, and checking the answer."""

from __future__ import annotations

import json
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker

from tests.http_client import HTTP
from tests.integration.reference import DEMO_MODEL

CONCURRENCY = 48


def ask(url: str, schema: dict[str, Any], seed: int, stream: bool) -> str:
    """The text of a seeded chat answer that has to conform to a schema and to end by itself."""
    body = {
        "model": DEMO_MODEL.name,
        "messages": [{"role": "user", "content": f"Describe object {seed} as JSON."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
        "seed": seed,
        "temperature": 0.8,
        "frequency_penalty": 0.5,  # or a recursive schema could go on for long
        "max_tokens": 1500,
        "stream": stream,
    }
    answer = HTTP.post(f"{url}/v1/chat/completions", json=body, timeout=240)
    assert answer.status_code == 200, answer.text
    if not stream:
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] == "stop", choice
        return str(choice["message"]["content"])
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert events, answer.text
    assert "error" not in events[-1], events[-1]
    choices = [event["choices"][0] for event in events]
    assert choices[-1]["finish_reason"] == "stop", choices[-1]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def check(schema: dict[str, Any], text: str) -> None:
    """Raises unless the text is JSON that conforms."""
    Draft202012Validator(schema, format_checker=FormatChecker()).validate(json.loads(text))
