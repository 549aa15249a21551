"""How much to think, as each API says it, reaches a chat template that reads `reasoning_effort`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.text.tokenizer import Tokenizer
from tests.unit.router.api_harness import MODEL, LiveApi

TEMPLATE = "{{ messages[-1].content }} [{{ reasoning_effort | default('its own') }}]"
ASKED = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def thinker(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveApi]:
    folder = Path(shutil.copytree(checkpoint, tmp_path_factory.mktemp("thinker") / "model"))
    config = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(folder)
    with LiveApi(folder, tokenizer) as live:
        yield live
    tokenizer.close()


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
