"""Behind a proxy that shows the router under a path, and removes it from requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from console.dashboard.pages import pages_router
from gateway.text.tokenizer import Tokenizer
from tests.unit.gateway.api_harness import MODEL, LiveApi

ROOT = "/team/llm"
HTML = {"accept": "text/html"}


@pytest.fixture(scope="module")
def shown(checkpoint: Path, tokenizer: Tokenizer) -> Iterator[LiveApi]:
    with LiveApi(checkpoint, tokenizer, root_path=ROOT) as live:
        live.reset()
        yield live


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}),
    ],
)
def test_a_receipt_lies_under_the_path(shown: LiveApi, path: str, body: dict) -> None:
    answer = shown.http.post(path, json={"model": MODEL, **body})
    own = answer.headers["x-baton-request-id"]
    assert answer.headers["x-baton-receipt"] == f"{ROOT}/v1/requests/{own}/receipt"


def test_clients_made_from_the_document_ask_under_the_path(shown: LiveApi, api: LiveApi) -> None:
    assert shown.http.get("/openapi.json").json()["servers"] == [{"url": ROOT}]
    assert api.http.get("/openapi.json").json()["servers"] == [{"url": "/"}]
    page = shown.http.get("/docs").text
    assert 'fetch("openapi.json")' in page, "relative to the page, wherever it lies"


async def test_browsers_and_programs_are_led_to_places_under_the_path() -> None:
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.include_router(pages_router(ROOT))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        root = await client.get("/", headers=HTML)
        assert root.headers["location"] == f"{ROOT}/dashboard/"
        places = (await client.get("/")).json()
    assert places.pop("service") == "Baton"
    assert all(place.startswith(f"{ROOT}/") for place in places.values())
    assert places["models"] == f"{ROOT}/v1/models"
