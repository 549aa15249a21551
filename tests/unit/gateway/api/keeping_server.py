"""A server that keeps responses in a real store, and clients of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from gateway.admission.api_keys import KeyRing, hash_key
from gateway.api.openai_responses import memory
from gateway.http.access import AccessRules
from gateway.text.tokenizer import Tokenizer
from process.store import response_records
from tests.unit.gateway.api_clients import SCHEMA
from tests.unit.gateway.api_harness import MODEL, TIMEOUT_S, LiveApi

TOOLS = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}]
OURS, THEIRS = (f"baton-{letter * 43}" for letter in "ab")
UNKNOWN = "resp_" + "0" * 32
MOST_CONTEXT = 100_000


@contextmanager
def keeping_server(checkpoint: Path, tokenizer: Tokenizer, redis_url: str) -> Iterator[LiveApi]:
    """A server with two keys. It waits long for its store, and not for responses it lacks."""
    rules = AccessRules(api=KeyRing([hash_key(OURS), hash_key(THEIRS)]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(response_records, "TIMEOUT_S", 60.0)  # a busy machine may take long
        patch.setattr(memory, "_LOOKS_S", (0.001,))
        with LiveApi(
            checkpoint, tokenizer, max_context=MOST_CONTEXT, rules=rules, redis_url=redis_url
        ) as live:
            live.http.headers["authorization"] = f"Bearer {OURS}"
            yield live


def client_of(api: LiveApi) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{api.url}/v1", api_key=OURS, max_retries=0, timeout=TIMEOUT_S)


def ask(client: openai.OpenAI, said: object = "Say it", **fields):
    return client.responses.create(**{"model": MODEL, "input": said, **fields})


def prompt_of(api: LiveApi) -> str:
    return api.tokenizer.decode(api.generator.requests[-1].token_ids, False)
