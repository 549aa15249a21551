"""References to items of responses that are kept, as the AI SDK sends a conversation's history."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.api.openai_responses import memory, references
from gateway.text.tokenizer import Tokenizer
from process.store.embedded_valkey import EmbeddedValkey
from tests.unit.gateway.api.keeping_server import THEIRS, TOOLS, keeping_server, prompt_of
from tests.unit.gateway.api_clients import CALL, SHORT_CALL, THINKING
from tests.unit.gateway.api_harness import MODEL, LiveApi

PATH = "/v1/responses"
HI = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def running_api(tools_checkpoint: Path, tools_tokenizer: Tokenizer) -> Iterator[LiveApi]:
    with (
        EmbeddedValkey() as valkey,
        keeping_server(tools_checkpoint, tools_tokenizer, valkey.url) as live,
    ):
        yield live


def ask(api: LiveApi, *items: Any, **fields: Any) -> dict[str, Any]:
    answer = api.post(PATH, {"model": MODEL, "input": list(items), **fields})
    assert answer.status_code == 200, answer.text
    shown: dict[str, Any] = answer.json()
    return shown


def refused(api: LiveApi, *items: Any, **fields: Any) -> httpx.Response:
    return api.post(PATH, {"model": MODEL, "input": list(items), **fields})


def referring(*items: dict[str, Any]) -> list[dict[str, str]]:
    return [{"type": "item_reference", "id": each["id"]} for each in items]


def check_same(api: LiveApi, referred: list[Any], whole: list[Any], **fields: Any) -> None:
    """Both lists of items give the same prompt."""
    ask(api, *referred, **fields)
    with_references = prompt_of(api)
    ask(api, *whole, **fields)
    assert with_references == prompt_of(api)


def test_every_kind_of_item_is_found_by_its_id(api):
    api.says(THINKING + "I ask." + SHORT_CALL + CALL)
    first = ask(api, HI, tools=TOOLS)
    kinds = [each["type"] for each in first["output"]]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    results = [
        {"type": "function_call_output", "call_id": each["call_id"], "output": "rain"}
        for each in first["output"][2:]
    ]
    whole = [HI, *first["output"], *results]
    check_same(api, [HI, *referring(*first["output"]), *results], whole, tools=TOOLS)
    api.says("It rains.")
    second = ask(api, HI, *referring(*first["output"]), *results, tools=TOOLS)
    listed = api.http.get(f"{PATH}/{second['id']}/input_items?limit=100&order=asc").json()["data"]
    assert [each["type"] for each in listed] == ["message", *kinds, *["function_call_output"] * 2]
    check_same(api, referring(*listed, *second["output"]), [*whole, *second["output"]], tools=TOOLS)


def test_an_id_alone_is_a_reference(api):
    first = ask(api, HI)
    [message] = first["output"]
    check_same(api, [HI, {"id": message["id"]}, HI], [HI, message, HI])
    check_same(api, [HI, {"id": message["id"], "type": None}, HI], [HI, message, HI])


def test_items_of_several_responses_are_found(api):
    first, second = ask(api, HI), ask(api, {**HI, "content": "And?"})
    check_same(
        api,
        [HI, *referring(*first["output"], *second["output"]), HI],
        [HI, *first["output"], *second["output"], HI],
    )


def test_a_conversation_by_references_looks_into_its_newest_response_alone(api, monkeypatch):
    looks: list[str] = []
    items = memory.ResponseMemory.items

    async def counted(self: memory.ResponseMemory, name: Any, wanted: Any) -> dict[str, bytes]:
        looks.append(name.id)
        return await items(self, name, wanted)

    monkeypatch.setattr(memory.ResponseMemory, "items", counted)
    given: list[Any] = [HI]
    for _ in range(4):
        answer = ask(api, *given)
        looks.clear()
        given += [*referring(*answer["output"]), HI]
    ask(api, *given)
    assert looks == [answer["id"]]


def test_what_the_previous_response_has_stands_once(api):
    first = ask(api, HI)
    second = ask(api, {**HI, "content": "And?"})
    before = {"previous_response_id": first["id"]}
    check_same(api, [*referring(*first["output"]), HI], [HI], **before)
    check_same(
        api,
        [*referring(*second["output"], *second["output"]), HI],
        [*second["output"], HI],
        **before,
    )
    count = api.post(
        f"{PATH}/input_tokens", {"model": MODEL, "input": [HI, *referring(*first["output"])]}
    )
    ask(api, HI, *first["output"])
    assert count.json()["input_tokens"] == len(api.generator.requests[-1].token_ids)


def test_an_item_that_is_not_kept_is_not_found(api):
    first = ask(api, HI)
    unkept = ask(api, HI, store=False)
    deleted = ask(api, HI)
    api.http.delete(f"{PATH}/{deleted['id']}")
    gone = first["output"][0]["id"].removesuffix("_0") + "_7"
    for item_id in (
        "msg_own", "rs_1", gone, unkept["output"][0]["id"], deleted["output"][0]["id"]
    ):  # fmt: skip
        answer = refused(api, HI, {"type": "item_reference", "id": item_id})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (404, "input")
        assert f"Item with id '{item_id}' not found." in error["message"]
        assert "`store`" in error["message"]


def test_another_keys_items_are_not_found(api):
    first = ask(api, HI)
    theirs = api.post(
        PATH,
        {"model": MODEL, "input": [HI, *referring(*first["output"])]},
        authorization=f"Bearer {THEIRS}",
    )
    assert theirs.status_code == 404
    assert ask(api, HI, *referring(*first["output"]))


def test_items_of_very_many_responses_are_refused(api, monkeypatch):
    monkeypatch.setattr(references, "MAX_RESPONSES", 1)
    first, second = ask(api, HI), ask(api, HI)
    answer = refused(api, HI, *referring(*first["output"], *second["output"]))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


def test_without_a_store_the_way_out_is_named(tools_api):
    answer = refused(tools_api, HI, {"type": "item_reference", "id": "msg_1"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "input[1]")
    assert "`store: false`" in error["message"]
