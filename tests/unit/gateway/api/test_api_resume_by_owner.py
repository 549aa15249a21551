"""A stream is resumed by the key that began it, at any router, and by no other key."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from gateway.admission.api_keys import KeyRing, hash_key
from gateway.http.access import AccessRules
from gateway.text.tokenizer import Tokenizer
from protocol.messages import FinishReason
from tests.unit.gateway.api_harness import MODEL, LiveApi, token_steps

OWNER, OTHER = f"baton-{'a' * 43}", f"baton-{'b' * 43}"
BODIES = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi"},
}


@pytest.fixture(scope="module", params=[True, False], ids=["keys", "no keys"])
def routers(
    request: pytest.FixtureRequest, checkpoint: Path, tokenizer: Tokenizer
) -> Iterator[list[LiveApi]]:
    """Two routers of one cluster, both of which know two keys of one cache, or have no keys."""
    lines = [f"{hash_key(key)} name={key[-1]} cache=team" for key in (OWNER, OTHER)]
    with ExitStack() as stack:
        apis = []
        for _ in range(2):
            keys = KeyRing(lines if request.param else [])
            rules = AccessRules(api=keys, salt=b"the cluster's secret")
            live = LiveApi(checkpoint, tokenizer, rules=rules, ids_key=b"of the cluster")
            apis.append(stack.enter_context(live))
        for api in apis:
            says_hello(api)
        yield apis


def says_hello(api: LiveApi) -> None:
    ids = api.tokenizer.encode("Hello world.", add_special_tokens=False)
    api.generator.script = lambda request: token_steps(
        request, ids, FinishReason.STOP, api.tokenizer
    )


def ask(api: LiveApi, path: str, key: str | None, last_id: str | None = None) -> httpx.Response:
    body = {"model": MODEL, "stream": True, **BODIES[path]}
    body |= {} if path == "/v1/responses" else {"max_tokens": 60}
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    headers |= {} if last_id is None else {"last-event-id": last_id}
    return api.http.post(path, json=body, headers=headers)


def ids_in(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [line[4:] for line in answer.text.splitlines() if line.startswith("id: ")]


@pytest.mark.parametrize("path", BODIES)
def test_only_the_key_that_began_a_stream_resumes_it(routers: list[LiveApi], path: str) -> None:
    events = ids_in(ask(routers[0], path, OWNER))
    for api in routers:
        rest = ids_in(ask(api, path, OWNER, events[2]))
        assert [each.partition(":")[2] for each in rest] == [
            each.partition(":")[2] for each in events[3:]
        ]
        refused = ask(api, path, OTHER, events[2])
        name, _, position = events[2].partition(":")
        unknown = ask(api, path, OTHER, f"{name[:-1]}{int(name[-1], 16) ^ 1:x}:{position}")
        assert refused.status_code == unknown.status_code == 400
        assert without_its_id(refused) == without_its_id(unknown)


def without_its_id(answer: httpx.Response) -> dict:
    document = answer.json()
    document.pop("request_id", None)
    return document


@pytest.mark.parametrize("routers", [False], indirect=True, ids=["no keys"])
def test_without_keys_a_client_that_names_none_resumes_its_stream(routers: list[LiveApi]) -> None:
    here, elsewhere = routers
    events = ids_in(ask(here, "/v1/completions", None))
    assert len(ids_in(ask(elsewhere, "/v1/completions", None, events[1]))) == len(events) - 2
    assert ask(elsewhere, "/v1/completions", OTHER, events[1]).status_code == 400
