"""No endpoint that reads a body or works on text escapes the gates, not even a new one."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import APIRouter, Request
from starlette.responses import Response

from gateway.admission.api_keys import KeyRing, hash_key
from gateway.admission.gate import Gate
from gateway.api.operations import OPERATIONS
from gateway.http.access import AccessRules
from gateway.http.paths import GENERATION
from gateway.http.request_scope import MAX_UNGATED_BODY_BYTES
from gateway.text.tokenizer import Tokenizer
from http_kit.tenant import EVERYBODY, KeyTerms, Tenant, tenant_of
from tests.unit.gateway.api_harness import MODEL, TIMEOUT_S, LiveApi

SMALL, OTHER = (f"baton-{letter * 43}" for letter in "ab")
SALT = b"the cluster's secret"
UNGATED = {
    ("get", "/v1/models"),
    ("get", "/v1/models/{model_id}"),
    ("get", "/v1/requests/{request_id}/receipt"),
    *((each.method, each.path) for each in OPERATIONS if each.tag in ("service", "operators")),
}
"""They read no client's body and do no work on text."""
NEW = ("/v1/brand_new", "/brand_new", "/control/brand_new")


def new_routes() -> APIRouter:
    """Routes whose author thought of no limit."""
    router = APIRouter()

    async def read(request: Request) -> Response:
        return Response(str(len(await request.body())))

    for path in NEW:
        router.add_api_route(path, read, methods=["POST"])
    return router


@pytest.fixture(scope="module")
def gate() -> Gate:
    return Gate(2, time.monotonic)


@pytest.fixture(scope="module")
def running_api(checkpoint: Path, tokenizer: Tokenizer, gate: Gate) -> Iterator[LiveApi]:
    with LiveApi(checkpoint, tokenizer, gate=gate, extra_routers=[new_routes()]) as live:
        yield live


@contextlib.contextmanager
def full(gate: Gate, tenant: Tenant = EVERYBODY) -> Iterator[None]:
    """As many requests are in flight as may."""
    with gate.passing(tenant, address="a"), gate.passing(tenant, address="b"):
        yield


def test_an_address_leaves_a_place_to_another_one(api: LiveApi, gate: Gate) -> None:
    transport = httpx.HTTPTransport(local_address="127.0.0.2")
    base = api.http.base_url
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    with httpx.Client(transport=transport, base_url=base, timeout=TIMEOUT_S) as other:
        assert other.post("/v1/completions", json=body).status_code == 200
        with gate.passing(EVERYBODY, address="127.0.0.1"):
            refused = api.http.post("/v1/completions", json=body)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) > 0
            assert other.post("/v1/completions", json=body).status_code == 200


def ask(api: LiveApi, method: str, path: str, **headers: str) -> httpx.Response:
    body = b"{}" if method == "post" else None
    sent = {"content-type": "application/json"} | headers
    return api.http.request(method.upper(), path.format_map(Ids()), content=body, headers=sent)


class Ids(dict[str, str]):
    """Whatever a path names."""

    def __missing__(self, name: str) -> str:
        return f"resp_{'0' * 32}"


@pytest.mark.parametrize("each", OPERATIONS, ids=lambda each: f"{each.method} {each.path}")
def test_every_operation_passes_its_gate_unless_it_is_light(api: LiveApi, gate: Gate, each) -> None:
    generates = each.path in GENERATION
    own, other = (gate, gate.for_text) if generates else (gate.for_text, gate)
    with full(own):
        answer = ask(api, each.method, each.path)
        is_refused = answer.status_code == 503 and "in flight" in answer.text
        assert is_refused == ((each.method, each.path) not in UNGATED)
        if is_refused:
            assert int(answer.headers["retry-after"]) >= 1
    with full(other):
        assert ask(api, each.method, each.path).status_code != 503
    assert gate.in_flight == gate.for_text.in_flight == 0


def test_a_new_route_is_counted_and_so_is_its_body(api: LiveApi, gate: Gate) -> None:
    for path in NEW[:2]:
        assert api.http.post(path, content=b"x" * 10).text == "10"
        with full(gate.for_text):
            assert api.http.post(path, content=b"x").status_code == 503
        with unfinished_upload(api, path, 9000, 8000):
            api.settle(lambda: api.metric("baton_http_bytes_in_flight") == 8000)
            assert gate.for_text.in_flight == 0, "an upload takes no place"
        api.settle(lambda: api.metric("baton_http_bytes_in_flight") == 0)


def test_operators_are_not_refused_but_their_bodies_are_small(api: LiveApi, gate: Gate) -> None:
    with full(gate), full(gate.for_text):
        assert api.http.post(NEW[2], content=b"x" * MAX_UNGATED_BODY_BYTES).status_code == 200
        assert api.http.post(NEW[2], content=b"x" * (MAX_UNGATED_BODY_BYTES + 1)).status_code == 413


@contextlib.contextmanager
def unfinished_upload(
    api: LiveApi, path: str, declared: int, sent: int, key: str = SMALL
) -> Iterator[None]:
    """A body that stalls."""
    with socket.create_connection(("127.0.0.1", api.port), timeout=TIMEOUT_S) as client:
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {key}\r\ncontent-length: {declared}\r\n\r\n"
        )
        client.sendall(head.encode() + b"x" * sent)
        yield


@pytest.fixture(scope="module")
def keyed(checkpoint: Path, tokenizer: Tokenizer) -> Iterator[LiveApi]:
    ring = KeyRing([f"{hash_key(SMALL)} name=small inflight=1", f"{hash_key(OTHER)} name=other"])
    rules = AccessRules(api=ring, salt=SALT)
    with LiveApi(checkpoint, tokenizer, gate=Gate(9, time.monotonic), rules=rules) as live:
        live.reset()
        yield live


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_stalled_uploads_leave_all_places_free(keyed: LiveApi, path: str) -> None:
    """Those of the key itself as well: a place is taken once a body is whole."""
    body = {"model": MODEL, "prompt": "Hi"}
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(unfinished_upload(keyed, path, 1000, 500))
        keyed.http.headers["authorization"] = f"Bearer {OTHER}"
        keyed.settle(lambda: keyed.metric("baton_http_bytes_in_flight") == 20 * 500)
        for key in (SMALL, OTHER):
            answer = keyed.post(path, body, authorization=f"Bearer {key}")
            assert answer.status_code == 200
    keyed.settle(lambda: keyed.metric("baton_http_bytes_in_flight") == 0)


def test_a_key_has_as_many_text_requests_as_sequences(
    checkpoint: Path, tokenizer: Tokenizer
) -> None:
    terms = KeyTerms("small", inflight=1)
    ring = KeyRing([f"{hash_key(SMALL)} name=small inflight=1"])
    gate = Gate(9, time.monotonic)
    tenant = tenant_of(SMALL, terms, SALT)
    rules = AccessRules(api=ring, salt=SALT)
    body = {"model": MODEL, "prompt": "Hi"}
    headers = {"authorization": f"Bearer {SMALL}"}
    with LiveApi(checkpoint, tokenizer, gate=gate, rules=rules) as live:
        live.reset()
        with gate.passing(tenant):
            assert live.post("/v1/completions", body, **headers).status_code == 429
            assert live.post("/tokenize", body, **headers).status_code == 200
        with gate.for_text.passing(tenant):
            refused = live.post("/tokenize", body, **headers)
            assert live.post("/v1/completions", body, **headers).status_code == 200
    assert refused.status_code == 429
    assert "requests for text alone of this key" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) >= 1
