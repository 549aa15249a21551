"""What keys allow: whose cache a request shares, how urgent it is, how many are in flight."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

from gateway.admission.api_keys import KeyRing, hash_key
from gateway.admission.gate import Gate
from gateway.admission.request_terms import SESSION_HEADERS
from gateway.http.access import AccessRules
from gateway.text.tokenizer import Tokenizer
from protocol.errors import DeadlineExceeded
from protocol.messages import FinishReason
from protocol.retention import USUAL_PRIORITY, RetentionHint
from router.requests.interface import GenerationRequest, TokenDelta
from tests.unit.gateway.api_harness import MODEL, TIMEOUT_S, LiveApi, Pause

PLAIN, OTHER, URGENT, BATCH, SMALL = (f"baton-{letter * 43}" for letter in "abcde")
MAX_INFLIGHT = 6


@pytest.fixture(scope="module")
def running_api(checkpoint: Path, tokenizer: Tokenizer) -> Iterator[LiveApi]:
    """A server with five keys: two of them share a cache."""
    ring = KeyRing(
        [
            f"{hash_key(PLAIN)} name=plain",
            f"{hash_key(OTHER)} name=other",
            f"{hash_key(URGENT)} name=urgent priority=-1 max_priority=-5 cache=team "
            "ttft_ms=500 tpot_ms=40",
            f"{hash_key(BATCH)} name=batch max_priority=3 cache=team",
            f"{hash_key(SMALL)} name=small inflight=1 tiers=off",
        ]
    )
    gate = Gate(MAX_INFLIGHT, time.monotonic, lambda: len(ring))
    rules = AccessRules(api=ring, salt=b"the cluster's secret")
    with LiveApi(checkpoint, tokenizer, gate=gate, rules=rules) as live:
        yield live


def complete(api: LiveApi, key: str, headers: dict[str, str] | None = None, **fields):
    body = {"model": MODEL, "prompt": "Hi", **fields}
    sent = {"Authorization": f"Bearer {key}", **(headers or {})}
    return api.http.post("/v1/completions", json=body, headers=sent)


def asked_by(api: LiveApi, key: str, **fields) -> GenerationRequest:
    """The request that a key's completion becomes."""
    api.generator.requests.clear()
    assert complete(api, key, **fields).status_code == 200
    return api.generator.requests[0]


def test_each_key_has_a_cache_of_its_own(api: LiveApi) -> None:
    salts = {key: asked_by(api, key).cache_salt for key in (PLAIN, OTHER, SMALL)}
    assert len(set(salts.values())) == 3
    assert all(salts.values())
    assert asked_by(api, PLAIN).cache_salt == salts[PLAIN]


def test_keys_of_one_group_share_a_cache(api: LiveApi) -> None:
    assert asked_by(api, URGENT).cache_salt == asked_by(api, BATCH).cache_salt


def test_a_salt_in_the_body_is_added_and_never_a_replacement(api: LiveApi) -> None:
    """Whatever a client sends, it does not reach another key's blocks."""
    foreign = asked_by(api, OTHER).cache_salt
    own = asked_by(api, PLAIN).cache_salt
    found = {asked_by(api, PLAIN, cache_salt=each).cache_salt for each in ("x", foreign, own)}
    assert len(found) == 3
    assert not found & {foreign, own}
    assert all(each.startswith(own) for each in found)


def test_a_key_may_forbid_tiers(api: LiveApi) -> None:
    assert asked_by(api, SMALL).stays_in_pool
    assert not asked_by(api, PLAIN).stays_in_pool


def test_tenants_are_told_apart_towards_workers(api: LiveApi) -> None:
    shares = [asked_by(api, key).share for key in (PLAIN, OTHER, URGENT, BATCH)]
    assert len(set(shares)) == 4
    assert not any(key in share for key in (PLAIN, OTHER) for share in shares)


@pytest.mark.parametrize(
    ("key", "asked", "served"),
    [
        (PLAIN, None, 0),
        (PLAIN, 0, 0),
        (PLAIN, 7, 7),
        (PLAIN, -1, None),
        (URGENT, None, -1),
        (URGENT, -5, -5),
        (URGENT, -6, None),
        (BATCH, None, 3),
        (BATCH, 0, None),
    ],
)
def test_a_key_limits_how_urgent_its_requests_are(
    api: LiveApi, key: str, asked: int | None, served: int | None
) -> None:
    fields = {} if asked is None else {"priority": asked}
    if served is not None:
        assert asked_by(api, key, **fields).priority == -served
        return
    answer = complete(api, key, **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "priority"
    assert f"{asked} is more urgent than this key allows" in error["message"]


def held(api: LiveApi) -> Pause:
    """Every generation waits until the pause ends, then says one token."""
    pause = Pause()
    api.generator.script = lambda request: [
        pause,
        TokenDelta([70], finish=FinishReason.LENGTH),
    ]
    return pause


def test_a_full_router_refuses_before_it_reads_the_body(api: LiveApi) -> None:
    pause = held(api)
    with ThreadPoolExecutor(MAX_INFLIGHT) as pool:
        running = [pool.submit(complete, api, PLAIN, n=3), pool.submit(complete, api, OTHER, n=3)]
        api.generator.wait_active(MAX_INFLIGHT)
        headers = {"Authorization": f"Bearer {SMALL}", "content-type": "application/json"}
        with httpx.Client(base_url=api.url, timeout=TIMEOUT_S) as client:
            refused = client.post("/v1/completions", content=b"{ no JSON", headers=headers)
            models = client.get("/v1/models", headers=headers)
        assert models.status_code == 200, "what does not generate passes no gate"
        pause.end()
        assert [each.result().status_code for each in running] == [200, 200]
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "overloaded"
    assert int(refused.headers["retry-after"]) >= 1
    assert complete(api, SMALL).status_code == 200


def test_a_key_with_as_many_requests_as_it_may_have_gets_429(api: LiveApi) -> None:
    pause = held(api)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(complete, api, SMALL)
        api.generator.wait_active(1)
        refused = complete(api, SMALL)
        other = pool.submit(complete, api, OTHER)
        api.generator.wait_active(2)
        pause.end()
        assert (running.result().status_code, other.result().status_code) == (200, 200)
    assert refused.status_code == 429
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
    assert refused.headers["x-ratelimit-limit-requests"] == "1"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.headers["x-ratelimit-reset-requests"].endswith("s")
    assert int(refused.headers["retry-after"]) >= 1
    answer = complete(api, OTHER)
    assert answer.headers["x-ratelimit-limit-requests"] == str(MAX_INFLIGHT // 2)
    assert answer.headers["x-ratelimit-remaining-requests"] == str(MAX_INFLIGHT // 2 - 1)


def test_one_key_takes_no_more_than_half_of_the_room(api: LiveApi) -> None:
    answer = complete(api, PLAIN, n=4)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "n"
    assert complete(api, PLAIN, n=3).status_code == 200
    answer = complete(api, PLAIN, prompt=["a", "b", "c"])
    assert answer.status_code == 200


def test_clients_libraries_know_the_refusals(api: LiveApi) -> None:
    pause = held(api)
    client = openai.OpenAI(base_url=f"{api.url}/v1", api_key=SMALL, max_retries=0)
    messages = anthropic.Anthropic(base_url=api.url, api_key=SMALL, max_retries=0)
    with ThreadPoolExecutor(1) as pool, client, messages:
        running = pool.submit(complete, api, SMALL)
        api.generator.wait_active(1)
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model=MODEL, prompt="Hi")
        with pytest.raises(anthropic.RateLimitError, match="rate_limit_error"):
            messages.messages.create(
                model=MODEL, max_tokens=1, messages=[{"role": "user", "content": "Hi"}]
            )
        pause.end()
        assert running.result().status_code == 200


def test_a_client_says_how_long_it_waits(api: LiveApi) -> None:
    assert complete(api, PLAIN, headers={"x-request-timeout-ms": "5000"}).status_code == 200
    (request,) = api.generator.requests
    assert 0 < request.deadline_ms <= 5000
    api.generator.script = lambda request: [DeadlineExceeded("it took too long")]
    answer = complete(api, PLAIN, headers={"x-request-timeout-ms": "5000"})
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize("name", ["x-request-timeout-ms", "x-baton-ttft-ms", "x-baton-tpot-ms"])
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "soon", "", "1" * 13])
def test_a_malformed_time_is_refused(api: LiveApi, name: str, value: str) -> None:
    answer = complete(api, PLAIN, headers={name: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name


def test_targets_come_from_the_headers_else_from_the_key(api: LiveApi) -> None:
    def targets(key: str, **headers: str) -> tuple[float | None, float | None]:
        named = {f"x-baton-{name}-ms": value for name, value in headers.items()}
        request = asked_by(api, key, headers=named)
        return request.ttft_target_ms, request.tpot_target_ms

    assert targets(PLAIN) == (None, None)
    assert targets(PLAIN, ttft="300") == (300, None)
    assert targets(URGENT) == (500, 40)
    assert targets(URGENT, tpot="20") == (500, 20)


@pytest.mark.parametrize("header", SESSION_HEADERS)
def test_sessions_of_different_keys_are_different(api: LiveApi, header: str) -> None:
    def session(key: str, name: str) -> str:
        return asked_by(api, key, headers={header: name}).session

    assert session(PLAIN, "mine") == session(PLAIN, "mine") != ""
    assert len({session(PLAIN, "mine"), session(PLAIN, "other"), session(OTHER, "mine")}) == 3
    assert asked_by(api, PLAIN).session == asked_by(api, PLAIN, headers={header: ""}).session == ""


def test_a_client_says_that_it_will_be_back(api: LiveApi) -> None:
    def hint(**changes) -> RetentionHint | None:
        return asked_by(api, PLAIN, **changes).retention

    assert hint() is None
    header = {"x-cache-retention": "300; priority=80"}
    assert hint(headers=header) == RetentionHint(300, 80)
    assert hint(headers={"x-cache-retention": "60"}) == RetentionHint(60, USUAL_PRIORITY)
    field = {"cache_retention": {"seconds": 20}}
    assert hint(headers=header, **field) == RetentionHint(20, USUAL_PRIORITY)


@pytest.mark.parametrize(
    "value", ["", "0", "soon", "86401", "5; priority=0", "5; priority=101", "5, priority=9", "-1"]
)
def test_a_malformed_hint_in_the_header_is_refused(api: LiveApi, value: str) -> None:
    answer = complete(api, PLAIN, headers={"x-cache-retention": value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-cache-retention"


def test_a_body_names_a_session_if_no_header_does(api: LiveApi) -> None:
    def session(name: str | None, **headers: str) -> str:
        return asked_by(api, PLAIN, headers=headers, session_id=name).session

    by_header = session(None, **{"x-session-id": "mine"})
    assert session("mine") == by_header != ""
    assert session("other", **{"x-session-id": "mine"}) == by_header
    assert session("") == session(None) == ""


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_cache_key_names_a_session_if_nothing_else_does(api: LiveApi, path: str) -> None:
    turn = [{"role": "user", "content": "Hi"}]

    def session(**fields: str) -> str:
        api.generator.requests.clear()
        body = {"model": MODEL, ("input" if "responses" in path else "messages"): turn, **fields}
        answer = api.http.post(path, json=body, headers={"Authorization": f"Bearer {PLAIN}"})
        assert answer.status_code == 200
        return api.generator.requests[0].session

    named = asked_by(api, PLAIN, session_id="mine").session
    assert session(prompt_cache_key="mine") == session(session_id="mine") == named != ""
    assert session(prompt_cache_key="other", session_id="mine") == named
    assert session(user="mine", safety_identifier="mine") == ""


def test_agents_of_one_session_have_conversations_of_their_own(api: LiveApi) -> None:
    """Agents of other sessions may have the same id."""

    def session(name: str, agent: str) -> str:
        headers = {"x-claude-code-session-id": name, "x-claude-code-agent-id": agent}
        return asked_by(api, PLAIN, headers=headers).session

    alone = asked_by(api, PLAIN, headers={"x-claude-code-session-id": "s"}).session
    assert session("s", "a") == session("s", "a")
    assert session("s", "") == alone
    assert session("", "a") == ""
    assert len({"", alone, session("s", "a"), session("s", "b"), session("t", "a")}) == 5
