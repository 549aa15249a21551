"""What web pages may ask of a router: hosts, sites, preflights and links."""

from __future__ import annotations

import json

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.responses import PlainTextResponse

from gateway.admission.key_files import KeyFiles
from gateway.http.access import KeyCheck, access_rules
from gateway.http.browsers import BrowserCheck, browser_rules
from gateway.http.server import url_of
from protocol.errors import ConfigError
from router_process.settings import RouterSettings
from tests.unit.gateway.api_harness import MODEL
from tests.unit.gateway.served_http import WAIT_S, Serve

KEY = "baton-" + "a" * 43
PAGE = "https://chat.example"


def settings(**values) -> RouterSettings:
    known = {"model": "m", "redis_url": "redis://x", "cluster_secret": "s" * 16}
    return RouterSettings(**(known | values))


def client_of(**values) -> tuple[httpx.AsyncClient, CollectorRegistry]:
    """A client of an application behind the checks that these settings ask for."""
    registry = CollectorRegistry()
    answer = PlainTextResponse("inside", headers={"x-baton-request-id": "r", "x-baton-new": "1"})
    keyed = KeyCheck(
        answer, access_rules(settings(**values), KeyFiles(CollectorRegistry())), registry
    )
    app = BrowserCheck(keyed, browser_rules(settings(**values)), registry)
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
    return client, registry


@pytest.mark.parametrize(
    ("values", "host", "status"),
    [
        ({}, "localhost", 200),
        ({}, "LocalHost:8000", 200),
        ({}, "127.0.0.1:9", 200),
        ({}, "[::1]:8000", 200),
        ({}, "[::1]", 200),
        ({}, "evil.example", 403),
        ({}, "evil.example:8000", 403),
        ({}, "localhost.evil.example", 403),
        ({}, "127.0.0.1.evil.example", 403),
        ({}, "", 403),
        ({"host": "127.0.0.2"}, "127.0.0.2:80", 200),
        ({"host": "::1"}, "[::1]:80", 200),
        ({"host": "0.0.0.0"}, "evil.example", 403),
        ({"host": "::"}, "evil.example:8000", 403),
        ({"host": "10.0.0.1"}, "evil.example", 403),
        ({"host": "0.0.0.0"}, "10.0.0.1.evil.example", 403),
        ({"host": "0.0.0.0"}, "10.0.0.1:8000", 200),
        ({"host": "10.0.0.1"}, "10.0.0.1", 200),
        ({"host": "::"}, "[fd00::7]:8000", 200),
        ({"host": "0.0.0.0"}, "localhost:8000", 200),
        ({"host": "box.lan"}, "Box.lan:8000", 200),
        ({"host": "0.0.0.0", "admin_keys": (KEY,)}, "evil.example", 403),
        ({"host": "0.0.0.0", "api_keys": (KEY,)}, "any.example", 401),
        ({"api_keys": (KEY,)}, "any.example", 401),
        ({"allowed_hosts": ("llm.example",)}, "llm.example:80", 200),
        ({"allowed_hosts": ("llm.example",)}, "localhost:80", 200),
        ({"allowed_hosts": ("llm.example",)}, "evil.example", 403),
        ({"allowed_hosts": ("*",)}, "any.example", 200),
        ({"host": "0.0.0.0", "allowed_hosts": ("LLM.example",)}, "llm.example", 200),
        ({"host": "0.0.0.0", "allowed_hosts": ("llm.example",)}, "10.0.0.1", 200),
        ({"allowed_hosts": ("llm.example",)}, "llm.example.:80", 200),
        ({"allowed_hosts": ("*.llm.example",)}, "a.b.LLM.example:80", 200),
        ({"allowed_hosts": ("*.llm.example",)}, "evil-llm.example", 403),
        ({"allowed_hosts": ("*.llm.example",)}, "llm.example", 403),
        ({"api_keys": (KEY,), "allowed_hosts": ("llm.example",)}, "evil.example", 403),
    ],
)
async def test_hosts(values, host: str, status: int) -> None:
    client, registry = client_of(**values)
    async with client:
        answer = await client.get("/v1/models", headers={"host": host})
        assert answer.status_code == status
        for path in ("/health", "/ready", "/live", "/metrics"):
            assert (await client.get(path, headers={"host": host})).status_code in (200, 401)
    if status == 403:
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "host_not_allowed")
        assert "--allowed-hosts" in error["message"]
        assert registry.get_sample_value("baton_http_browsers_refused_total", {"reason": "host"})


async def test_a_client_that_names_no_host_is_no_browser() -> None:
    client, _ = client_of(allowed_hosts=("llm.example",))
    async with client:
        request = client.build_request("GET", "/v1/models")
        del request.headers["host"]
        assert (await client.send(request)).status_code == 200


CROSS = {"sec-fetch-site": "cross-site", "origin": PAGE}
LINK = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


@pytest.mark.parametrize("path", ["/v1/models", "/v1/messages", "/fleet", "/health", "/docs"])
@pytest.mark.parametrize("values", [{}, {"cors_origins": ("https://other.example",)}])
async def test_pages_of_other_sites_are_refused(path: str, values) -> None:
    client, registry = client_of(**values)
    async with client:
        for headers in (CROSS, {"sec-fetch-site": "cross-site"}, CROSS | {"origin": "null"}):
            answer = await client.get(path, headers=headers)
            assert answer.status_code == 403
            assert "access-control-allow-origin" not in answer.headers
        asked = {"access-control-request-method": "POST", **CROSS}
        assert (await client.options(path, headers=asked)).status_code == 403
        for site in ("same-origin", "same-site", "none"):
            assert (await client.get(path, headers={"sec-fetch-site": site})).status_code == 200
    error = answer.json()["error"]
    kind = "permission_error" if path == "/v1/messages" else "invalid_request_error"
    assert error["type"] == kind
    assert "--cors-origins" in error["message"]
    refused = registry.get_sample_value(
        "baton_http_browsers_refused_total", {"reason": "cross-site"}
    )
    assert refused == 4


async def test_links_to_the_routers_pages_are_followed() -> None:
    client, _ = client_of()
    async with client:
        for path in ("/", "/dashboard", "/docs"):
            assert (await client.get(path, headers=LINK)).status_code == 200
            assert (await client.post(path, headers=LINK)).status_code == 403
            framed = LINK | {"sec-fetch-dest": "iframe"}
            assert (await client.get(path, headers=framed)).status_code == 403
        for path in ("/v1/models", "/fleet", "/docs/x"):
            assert (await client.get(path, headers=LINK)).status_code == 403


@pytest.mark.parametrize("origins", [(PAGE,), ("https://other.example", PAGE), ("*",)])
async def test_pages_of_allowed_origins_are_served(origins) -> None:
    client, _ = client_of(cors_origins=origins, api_keys=(KEY,))
    async with client:
        asked = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
            "access-control-request-private-network": "true",
            **CROSS,
        }
        preflight = await client.options("/v1/chat/completions", headers=asked)
        answer = await client.get("/v1/models", headers=CROSS | {"x-api-key": KEY})
        closed = await client.get("/v1/models", headers=CROSS)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-methods"] == "GET, POST, DELETE"
    assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
    assert preflight.headers["access-control-allow-private-network"] == "true"
    assert (answer.status_code, closed.status_code) == (200, 401)
    exposed = answer.headers["access-control-expose-headers"].split(", ")
    assert {"x-request-id", "x-baton-request-id", "x-baton-new", "retry-after"} <= set(exposed)
    for each in (preflight, answer, closed):
        assert each.headers["access-control-allow-origin"] == PAGE
        assert each.headers["vary"] == "origin"


async def test_an_allowed_page_reads_whole_answers_and_streams(serve: Serve) -> None:
    """Of a real server, whose usual answers do not pass through the middleware."""
    served = await serve()
    served.tokens(3)
    inner = served.server.config.loaded_app
    rules = browser_rules(settings(cors_origins=(PAGE,)))
    served.server.config.loaded_app = BrowserCheck(inner, rules, CollectorRegistry())
    async with httpx.AsyncClient(base_url=url_of(served.listener), timeout=WAIT_S) as client:
        for headers, shared in ((CROSS, PAGE), ({}, None)):
            for stream in (False, True):
                body = {"model": MODEL, "prompt": "Hi", "max_tokens": 3, "stream": stream}
                answer = await client.post("/v1/completions", json=body, headers=headers)
                assert answer.status_code == 200
                assert answer.headers.get("access-control-allow-origin") == shared
                assert answer.text.endswith("[DONE]\n\n") or json.loads(answer.text)["choices"]
                if shared:
                    exposed = answer.headers["access-control-expose-headers"]
                    assert "x-baton-request-id" in exposed


@pytest.mark.parametrize(
    "flag",
    ["--allowed-hosts=a b", "--allowed-hosts=x:80", "--cors-origins=chat.example",
     "--cors-origins=https://chat.example/page"],
)  # fmt: skip
def test_a_malformed_name_stops_the_start(flag: str) -> None:
    from process.settings import load_settings

    with pytest.raises(ConfigError, match=flag.partition("=")[0]):
        load_settings(RouterSettings, [flag], prog="x", description="", section="router")
