"""The operator's file of prefixes that all clients share, and the requests that begin with one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.admission.shared_prefixes import SharedPrefixes
from gateway.chat.markup import find_markup
from gateway.shared_prefixes_file import load_shared_prefixes, read_shared_prefixes
from gateway.text.tokenizer import Tokenizer
from protocol.errors import ConfigError
from router_process.settings import RouterSettings
from tests.unit.gateway.api_harness import LiveApi

TEXT = "Hello there, one two three."
SYSTEM = {"role": "system", "content": "You know a world of words."}
BODIES = [{"prompt": TEXT}, {"messages": [SYSTEM]}]


@pytest.fixture(scope="module")
def running_api(
    checkpoint: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveApi]:
    path = tmp_path_factory.mktemp("prefixes") / "file"
    path.write_text("".join(f"{json.dumps(each)}\n\n" for each in BODIES))
    prefixes = read_shared_prefixes(str(path), tokenizer, find_markup(tokenizer))
    with LiveApi(checkpoint, tokenizer, shared_prefixes=prefixes) as live:
        yield live


def shared_text(api: LiveApi, path: str, **body) -> str:
    """What a request's prompt shares with all others."""
    api.generator.requests.clear()
    assert api.post(path, {"model": "tiny", "max_tokens": 1, **body}).status_code == 200
    (request,) = api.generator.requests
    return api.tokenizer.decode(request.token_ids[: request.shared_tokens], False)


def test_a_prompt_shares_what_is_declared(api: LiveApi) -> None:
    assert shared_text(api, "/v1/completions", prompt=f"{TEXT} And more.") == TEXT
    assert shared_text(api, "/v1/completions", prompt="Hello") == "Hello"
    assert shared_text(api, "/v1/completions", prompt=f"No! {TEXT}") == ""


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_conversation_shares_the_declared_system_prompt(api: LiveApi, path: str) -> None:
    user = {"role": "user", "content": "Say it"}
    if path == "/v1/messages":
        body = {"system": SYSTEM["content"], "messages": [user]}
    elif path == "/v1/responses":
        body = {"instructions": SYSTEM["content"], "input": "Say it"}
    else:
        body = {"messages": [SYSTEM, user]}
    body |= {"max_output_tokens": 1} if "input" in body else {}
    written = f"<|start|>system\n{SYSTEM['content']}<|end|>\n<|start|>"
    assert shared_text(api, path, **body) == written


def test_every_choice_of_a_prompt_shares_it(api: LiveApi) -> None:
    api.generator.requests.clear()
    body = {"model": "tiny", "prompt": [TEXT, "other"], "n": 2, "max_tokens": 1}
    assert api.post("/v1/completions", body).status_code == 200
    num_tokens = len(api.tokenizer.encode(TEXT, True))
    shared = [each.shared_tokens for each in api.generator.requests]
    assert sorted(shared) == [0, 0, num_tokens, num_tokens]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"prompt": "a"}\n{"prompt": "a"', "line 2: the body is not valid JSON"),
        ('"a"', "line 1: the body must be a JSON object"),
        ('{"promt": "a"}', "line 1: .*promt"),
        ("{}", "line 1: give either 'prompt' or 'messages'"),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}', "line 1: give either"),
        ('{"messages": [{"role": "user"}]}', "line 1: .*content"),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "line 1: .*tool_call_id"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", '
         '"function": {"name": "f"}}]}', "line 1: .*tools"),
        ("\n\n", "declares no prefix"),
        (b"\xff", "cannot be read"),
        (None, "cannot be read"),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_stops_the_start(
    tokenizer: Tokenizer, tmp_path: Path, content: str | bytes | None, words: str
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=f"shared_prefixes_file .*{words}"):
        read_shared_prefixes(str(path), tokenizer, find_markup(tokenizer))


def test_without_a_file_nothing_is_shared(tokenizer: Tokenizer) -> None:
    settings = RouterSettings(
        model="m", redis_url="redis://unused", cluster_secret="a secret of sixteen"
    )
    prefixes = load_shared_prefixes(settings, tokenizer)
    assert (len(prefixes), prefixes.num_shared([1, 2])) == (0, 0)
    assert SharedPrefixes([[1, 2]]).num_shared([]) == 0
