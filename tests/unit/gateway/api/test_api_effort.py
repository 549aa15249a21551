"""How much to think, as each API says it, reaches a chat template that reads `reasoning_effort`."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.text.tokenizer import Tokenizer
from tests.unit.gateway.api_clients import SCHEMA
from tests.unit.gateway.api_clients import TEMPLATE as WITH_TOOLS
from tests.unit.gateway.api_harness import MODEL, LiveApi

TEMPLATE = "{{ messages[-1].content }} [{{ reasoning_effort | default('its own') }}]"
ASKED = [{"role": "user", "content": "x"}]


@contextlib.contextmanager
def served(checkpoint: Path, folder: Path, templates: object) -> Iterator[LiveApi]:
    """The checkpoint with other templates: one, or several by name."""
    shutil.copytree(checkpoint, folder)
    config = {"eos_token": "<|end|>", "chat_template": templates}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(folder)
    with LiveApi(folder, tokenizer) as live:
        yield live
    tokenizer.close()


@pytest.fixture(scope="module")
def thinker(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveApi]:
    with served(checkpoint, tmp_path_factory.mktemp("thinker") / "model", TEMPLATE) as live:
        yield live


def effort_of(api: LiveApi, path: str, body: dict[str, object]) -> str:
    api.reset()
    answer = api.post(path, {"model": MODEL, **body})
    assert answer.status_code == 200, answer.text
    [request] = api.generator.requests
    api.generator.wait_idle()
    prompt = api.tokenizer.decode(request.token_ids, False)
    return prompt.removeprefix("x [").removesuffix("]")


@pytest.mark.parametrize(
    "effort", [None, "none", "minimal", "low", "medium", "high", "xhigh", "max"]
)
def test_openais_efforts_are_the_templates(thinker: LiveApi, effort: str | None) -> None:
    chat = {"messages": ASKED, "reasoning_effort": effort}
    response = {"input": "x", "reasoning": {"effort": effort}}
    wanted = effort or "its own"
    assert effort_of(thinker, "/v1/chat/completions", chat) == wanted
    assert effort_of(thinker, "/v1/responses", response) == wanted


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, "its own"),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "enabled", "budget_tokens": 4095}}, "low"),
        ({"thinking": {"type": "enabled", "budget_tokens": 4096}}, "medium"),
        ({"thinking": {"type": "enabled", "budget_tokens": 16384}}, "high"),
        ({"thinking": {"type": "adaptive"}}, "medium"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, "max"),
        ({"output_config": {"effort": "low"}}, "low"),
    ],
)
def test_anthropics_budgets_become_efforts(
    thinker: LiveApi, fields: dict[str, object], effort: str
) -> None:
    body = {"messages": ASKED, "max_tokens": 9, **fields}
    assert effort_of(thinker, "/v1/messages", body) == effort


TOOLS: dict[str, object] = {
    "/v1/chat/completions": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    "/v1/responses": [{"type": "function", "name": "f", "parameters": SCHEMA}],
    "/v1/messages": [{"name": "f", "input_schema": SCHEMA}],
}
LOW: dict[str, tuple[dict[str, object], str]] = {
    "/v1/chat/completions": ({"messages": ASKED, "reasoning_effort": "low"}, "reasoning_effort"),
    "/v1/responses": ({"input": "x", "reasoning": {"effort": "low"}}, "reasoning.effort"),
    "/v1/messages": (
        {"messages": ASKED, "max_tokens": 9, "output_config": {"effort": "low"}},
        "output_config.effort",
    ),
}


@pytest.mark.parametrize("tools_think", [True, False], ids=["with tools", "without tools"])
@pytest.mark.parametrize("path", LOW)
def test_an_effort_is_for_the_template_that_writes_the_prompt(
    checkpoint: Path, tmp_path: Path, path: str, tools_think: bool
) -> None:
    """Only one of the two templates knows efforts; for the other one they are ignored and named."""
    plain = WITH_TOOLS.replace("enable_thinking", "unknown")
    thinking = "{{- '[' + reasoning_effort | default('') + ']' }}" + plain
    default, tool_use = (plain, thinking) if tools_think else (thinking, plain)
    templates = [
        {"name": "default", "template": default},
        {"name": "tool_use", "template": tool_use},
    ]
    fields, named = LOW[path]
    with served(checkpoint, tmp_path / "model", templates) as live:
        for has_tools in (True, False):
            live.reset()
            body = {"model": MODEL, **fields, **({"tools": TOOLS[path]} if has_tools else {})}
            answer = live.post(path, body)
            assert answer.status_code == 200, answer.text
            thinks = has_tools == tools_think
            assert answer.headers.get("x-baton-ignored") == (None if thinks else named)
            [request] = live.generator.requests
            prompt = live.tokenizer.decode(request.token_ids, False)
            assert prompt.startswith("[low]") == thinks
            assert ("tools:f " in prompt) == has_tools
            live.generator.wait_idle()
