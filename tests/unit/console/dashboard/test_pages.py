"""The page's files over HTTP: where they lie, under which policy, and how many bytes they are."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI

from console.dashboard.pages import page_files, pages_router

MOST_BYTES = 150_000
MOST_BYTES_SENT = 60_000
FILES = page_files()


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.include_router(pages_router())
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as made:
        yield made


@pytest.mark.parametrize("name", sorted(FILES))
async def test_a_file_and_its_policy(name: str, client: httpx.AsyncClient) -> None:
    answer = await client.get(f"/dashboard/{name}")
    assert answer.status_code == 200
    assert answer.content == FILES[name].read_bytes()
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    again = await client.get(
        f"/dashboard/{name}", headers={"if-none-match": answer.headers["etag"]}
    )
    assert (again.status_code, again.content) == (304, b"")
    plain = await client.get(f"/dashboard/{name}", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.content == answer.content


@pytest.mark.parametrize("name", ["../settings.py", "page/app.js", "pages.py", "vendor/", "x.js"])
async def test_nothing_else_is_served(name: str, client: httpx.AsyncClient) -> None:
    answer = await client.get(f"/dashboard/{name.replace('/', '%2F')}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


async def test_a_browser_is_led_to_the_page(client: httpx.AsyncClient) -> None:
    accept = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    root = await client.get("/", headers=accept)
    assert (root.status_code, root.headers["location"]) == (307, "dashboard/")
    without_slash = await client.get("/dashboard")
    assert (without_slash.status_code, without_slash.headers["location"]) == (307, "dashboard/")
    told = (await client.get("/", headers={"accept": "application/json"})).json()
    assert (told["openai"], told["documentation"]) == ("/v1", "/docs")


def test_addresses_are_relative() -> None:
    """The page works under any prefix, and asks no other host for anything."""
    for name, path in FILES.items():
        if name.startswith("vendor/"):
            continue
        text = path.read_text(encoding="utf-8")
        found = re.findall(r"""(?:src|href|from|import)\s*=?\s*["'`]([^"'`]*)["'`]""", text)
        assert [each for each in found if each.startswith(("/", "http"))] == [], name
        assert [each for each in re.findall(r"https?://\S+", text) if "w3.org" not in each] == []


async def test_all_files_together_are_small(client: httpx.AsyncClient) -> None:
    """A browser gets them packed."""
    sent = unpacked = 0
    for name in FILES:
        answer = await client.get(f"/dashboard/{name}", headers={"accept-encoding": "gzip"})
        assert answer.headers["content-encoding"] == "gzip"
        sent += answer.num_bytes_downloaded
        unpacked += len(answer.content)
    assert sent <= MOST_BYTES_SENT
    assert unpacked <= MOST_BYTES


def test_the_code_of_others_is_what_its_notice_says() -> None:
    vendored = [path for name, path in FILES.items() if name.startswith("vendor/")]
    notice = vendored[0].with_name("README.md").read_text(encoding="utf-8")
    for path in vendored:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert f"| `{path.name}` |" in notice
        assert digest in notice
