"""Which key opens which path, for every combination of keys that an operator may set."""

from __future__ import annotations

import logging

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.responses import PlainTextResponse

from gateway.admission.api_keys import KeyRing, hash_key
from gateway.admission.key_files import KeyFiles
from gateway.http.access import AccessRules, Door, KeyCheck, access_rules, warn_of_open_doors
from http_kit.caller import CALLER, Caller, digest_of
from router_process.settings import RouterSettings

API, ADMIN, SUPERVISOR, VIEWER = (f"baton-{letter * 43}" for letter in "abcd")  # names of tests
READ = {
    "/fleet",
    "/flight",
    "/requests",
    "/requests/r/trace",
    "/doctor",
    "/doctor/observation",
    "/cache",
    "/dashboard/stream",
}
PAGE = {"/", "/dashboard", "/dashboard/", "/dashboard/app.js"}
CONTROLS = {"/control/drain", "/control/settings"}
PATHS = (
    "/v1/completions", "/v1/models", "/tokenize", "/later", "/metrics", "/docs", *READ, *PAGE,
    *CONTROLS,
)  # fmt: skip
PROBES = {"/health", "/ready", "/live", "/ping", "/version"}


def ring(*keys: str) -> KeyRing:
    return KeyRing(hash_key(each) for each in keys)


def guarded(**rules) -> tuple[httpx.AsyncClient, CollectorRegistry]:
    registry = CollectorRegistry()
    app = KeyCheck(PlainTextResponse("inside"), AccessRules(**rules), registry)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test"), registry


async def opened(client: httpx.AsyncClient, key: str | None) -> set[str]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    answers = {path: await client.get(path, headers=headers) for path in (*PATHS, *PROBES)}
    assert {answer.status_code for answer in answers.values()} <= {200, 401}
    return {path for path, answer in answers.items() if answer.status_code == 200}


EVERYTHING = {*PATHS, *PROBES}
OPEN = {"/docs", *PAGE, *PROBES}
V1 = {"/v1/completions", "/v1/models", "/tokenize"}
OPERATORS = EVERYTHING - V1
DOCS = {"/docs", *PAGE}


@pytest.mark.parametrize(
    ("rings", "key", "expected"),
    [
        ({}, None, EVERYTHING - CONTROLS),
        ({"supervisor": ring(SUPERVISOR)}, None, EVERYTHING - CONTROLS),
        ({"supervisor": ring(SUPERVISOR)}, SUPERVISOR, EVERYTHING),
        ({"viewer": ring(VIEWER)}, None, OPEN | V1),
        ({"viewer": ring(VIEWER)}, VIEWER, OPEN | V1 | READ | {"/metrics"}),
        ({"admin": ring(ADMIN), "viewer": ring(VIEWER)}, VIEWER, OPEN | V1 | READ | {"/metrics"}),
        ({"admin": ring(ADMIN), "viewer": ring(VIEWER)}, ADMIN, EVERYTHING),
        ({"api": ring(API), "viewer": ring(VIEWER)}, API, OPEN | V1),
        ({"api": ring(API)}, None, OPEN),
        ({"api": ring(API)}, API, OPEN | V1),
        ({"api": ring(API), "supervisor": ring(SUPERVISOR)}, SUPERVISOR, OPERATORS),
        ({"api": ring(API), "admin": ring(ADMIN)}, API, OPEN | V1),
        ({"api": ring(API), "admin": ring(ADMIN)}, ADMIN, OPERATORS),
        ({"api": ring(API), "admin": ring(ADMIN)}, "wrong" * 5, OPEN),
        ({"admin": ring(ADMIN)}, None, OPEN | V1),
        ({"admin": ring(ADMIN)}, ADMIN, EVERYTHING),
        ({"api": ring(API), "health": Door.API}, None, DOCS),
        ({"api": ring(API), "health": Door.API}, API, OPEN | V1),
        ({"api": ring(API), "metrics": Door.OPEN}, None, OPEN | {"/metrics"}),
        ({"admin": ring(ADMIN), "health": Door.ADMIN}, None, DOCS | V1),
        ({"viewer": ring(VIEWER), "metrics": Door.ADMIN}, VIEWER, OPEN | V1 | READ),
    ],
)
async def test_doors(rings, key: str | None, expected: set[str]) -> None:
    client, _ = guarded(**rings)
    async with client:
        assert await opened(client, key) == expected


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/v1/models", "//v1/responses/"])
async def test_a_wrong_path_of_the_api_needs_an_api_key(path: str) -> None:
    client, _ = guarded(api=ring(API), admin=ring(ADMIN))
    async with client:
        for key, status in ((None, 401), (ADMIN, 401), (API, 200)):
            headers = {} if key is None else {"x-api-key": key}
            answer = await client.get(f"http://x{path}", headers=headers)
            assert answer.status_code == status, key
            assert "/v1" not in answer.text


async def test_no_key_tells_which_paths_operators_have() -> None:
    for rings in ({"api": ring(API)}, {"api": ring(API), "admin": ring(ADMIN)}):
        client, _ = guarded(**rings)
        async with client:
            for headers in ({}, {"x-api-key": API}):
                answers = [
                    await client.get(path, headers=headers) for path in ("/metrics", "/nowhere")
                ]
                assert answers[0].status_code == answers[1].status_code == 401
                assert answers[0].content == answers[1].content


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("Authorization", API)],
        [("Authorization", f"Basic {API}")],
        [("Authorization", "Bearer")],
        [("Authorization", "Bearer ")],
        [("Authorization", f"Bearer {API} {API}")],
        [("Authorization", f"Bearer {API}"), ("Authorization", "Bearer x")],
        [("api-key", API)],
        [("x-api-key", API), ("x-api-key", API)],
        [("x-api-key", f"Bearer {API}")],
    ],
)
async def test_a_refusal_has_openais_shape_and_is_counted(headers) -> None:
    client, registry = guarded(api=ring(API))
    async with client:
        answer = await client.post("/v1/completions", headers=headers, json={})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert API not in answer.text
    assert registry.get_sample_value("baton_http_unauthorized_total", {"door": "api"}) == 1


@pytest.mark.parametrize("path", ["/v1/models", "/v1/messages", "/fleet"])
async def test_a_refusal_says_whether_a_key_was_sent(path: str) -> None:
    client, _ = guarded(api=ring(API), admin=ring(ADMIN))
    async with client:
        for headers in ({}, {"x-api-key": ""}, {"Authorization": "Basic a"}):
            answer = await client.get(path, headers=headers)
            assert "Authorization: Bearer KEY" in answer.json()["error"]["message"]
        for headers in ({"x-api-key": VIEWER}, {"Authorization": f"Bearer {VIEWER}"}):
            answer = await client.get(path, headers=headers)
            assert "the key that was sent is not one" in answer.json()["error"]["message"]


async def test_the_scheme_is_not_case_sensitive() -> None:
    client, _ = guarded(api=ring(API))
    async with client:
        headers = {"Authorization": f"bearer  {API}"}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200


async def test_anthropics_header_opens_as_well() -> None:
    client, _ = guarded(api=ring(API))
    async with client:
        for others in ({}, {"Authorization": "Bearer none"}):
            headers = {"x-api-key": API, **others}
            assert (await client.get("/v1/models", headers=headers)).status_code == 200


async def test_a_missing_admin_key_says_how_to_set_one() -> None:
    client, _ = guarded(api=ring(API))
    async with client:
        answer = await client.get("/fleet", headers={"Authorization": f"Bearer {API}"})
    assert "BATON_ADMIN_KEYS" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("rings", "path", "has_keys"),
    [
        ({"viewer": ring(VIEWER)}, "/fleet", True),
        ({"viewer": ring(VIEWER)}, "/later", False),
        ({"viewer": ring(VIEWER)}, "/control/drain", False),
        ({"admin": ring(ADMIN)}, "/fleet", True),
        ({"admin": ring(ADMIN)}, "/control/drain", True),
        ({"api": ring(API)}, "/v1/models", True),
        ({"api": ring(API), "supervisor": ring(SUPERVISOR)}, "/later", False),
    ],
)
async def test_a_refusal_says_if_no_key_opens_its_door(rings, path: str, has_keys: bool) -> None:
    client, _ = guarded(**rings)
    async with client:
        answer = await client.get(path)
    assert answer.status_code == 401
    assert ("the router has none" in answer.json()["error"]["message"]) is not has_keys


def settings(**values) -> RouterSettings:
    known = {"model": "m", "redis_url": "redis://x", "cluster_secret": "s" * 16}
    return RouterSettings(**(known | values))


def test_rules_come_from_the_settings() -> None:
    rules = access_rules(
        settings(api_keys=(API,), admin_keys=(ADMIN,), supervisor_key=SUPERVISOR),
        KeyFiles(CollectorRegistry()),
    )
    assert rules.find(Door.API, [API])
    assert not rules.find(Door.API, [ADMIN])
    assert rules.find(Door.ADMIN, [ADMIN])
    assert rules.find(Door.ADMIN, [SUPERVISOR])
    assert API not in repr(settings(api_keys=(API,)))


@pytest.mark.parametrize(
    ("host", "keys", "warns"),
    [
        ("127.0.0.1", (), False),
        ("::1", (), False),
        ("localhost", (), False),
        ("0.0.0.0", (), True),
        ("::", (), True),
        ("10.0.0.1", (), True),
        ("example.org", (), True),
        ("0.0.0.0", (API,), False),
    ],
)
def test_an_open_door_to_strangers_is_told(host, keys, warns, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_open_doors(settings(host=host, api_keys=keys))
    assert bool(caplog.records) is warns


def test_a_file_of_keys_closes_the_door_to_strangers(caplog) -> None:
    warn_of_open_doors(settings(host="0.0.0.0", api_key_file="keys.json"))
    assert caplog.records == []


RECEIPT = "/v1/requests/cmpl-1/receipt"


async def test_a_receipt_opens_for_api_keys_and_for_operators() -> None:
    client, _ = guarded(api=ring(API), admin=ring(ADMIN))
    for key, status in ((API, 200), (ADMIN, 200), (SUPERVISOR, 401), (None, 401)):
        headers = {} if key is None else {"x-api-key": key}
        assert (await client.get(RECEIPT, headers=headers)).status_code == status
    headers = {"x-api-key": ADMIN}
    assert (await client.get("/v1/requests/a/b/receipt", headers=headers)).status_code == 401
    assert (await client.get("/v1/models", headers=headers)).status_code == 401


async def callers(rules: AccessRules, path: str, *headers: dict[str, str]) -> list[Caller | None]:
    """The callers that an application behind these rules sees."""
    seen: list[Caller | None] = []

    async def app(scope, receive, send) -> None:
        seen.append(scope.get(CALLER))
        await PlainTextResponse("inside")(scope, receive, send)

    transport = httpx.ASGITransport(KeyCheck(app, rules, CollectorRegistry()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for each in headers:
            assert (await client.get(path, headers=each)).status_code == 200
    return seen


async def test_the_caller_is_known_by_a_digest_of_its_key() -> None:
    rules = AccessRules(api=ring(API), admin=ring(ADMIN), salt=b"salt")
    keys = [{"Authorization": f"Bearer {key}"} for key in (API, API, ADMIN)]
    first, second, admin = await callers(rules, RECEIPT, *keys)
    assert first is not None
    assert admin is not None
    assert first == second == Caller(digest_of(API, b"salt"))
    assert API.encode() not in first.digest
    assert admin.is_admin
    assert admin.digest != first.digest


async def test_without_keys_callers_are_told_apart_by_what_they_send() -> None:
    both = {"Authorization": "Bearer one", "x-api-key": "two"}
    found = await callers(AccessRules(salt=b"salt"), "/v1/models", {}, {"x-api-key": "two"}, both)
    assert found == [None, Caller(digest_of("two", b"salt")), Caller(digest_of("one", b"salt"))]
    assert await callers(AccessRules(salt=b"salt"), "/fleet", both) == [None]


async def test_a_caller_with_two_keys_is_the_tenant_of_the_one_that_opens() -> None:
    rules = AccessRules(api=ring(API), salt=b"salt")
    [plain, both] = await callers(
        rules, "/v1/models", {"x-api-key": API}, {"Authorization": "Bearer x", "x-api-key": API}
    )
    assert plain is not None
    assert both is not None
    assert both.tenant == plain.tenant
    assert plain.tenant.share
