"""A caller whose grammar takes long to follow waits for it alone, and ends when it takes too
long."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cli.fleet import Fleet
from tests.http_client import HTTP
from tests.integration.fleets import all_counters, complete, running_fleet
from tests.unit.slow_grammars import ambiguous_grammar

GRAMMAR = ambiguous_grammar()
LATE_GRAMMAR = ambiguous_grammar(head="/[0-9]{20}/")
"""Its first tokens are quick."""
PROMPT = list(range(20, 60))


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    environment = {
        "BATON_MASK_LIMIT_S": "1", "BATON_MASK_WAIT_MS": "20", "BATON_LOG_FORMAT": "json",
    }  # fmt: skip
    with running_fleet(environment, prefill=1, decode=1, local_prefill_threshold_tokens=0) as fleet:
        yield fleet


def attack(fleet: Fleet, grammar: str, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    body = {
        "model": "demo_model",
        "prompt": PROMPT,
        "max_tokens": 400,
        "temperature": 1.0,
        "seed": 1,
        "structured_outputs": {"grammar": grammar},
    }
    return HTTP.post(
        f"{fleet.url}/v1/completions", json=body | fields, headers=headers, timeout=120
    )


def slow_grammars(fleet: Fleet) -> int:
    return sum(each["slow_grammars"] for each in all_counters(fleet).values())


def test_other_streams_finish_beside_a_slow_grammar_which_is_refused(fleet: Fleet) -> None:
    alone = complete(fleet, PROMPT, max_tokens=60)["choices"][0]["token_ids"]
    with ThreadPoolExecutor(1) as pool:
        attacker = pool.submit(attack, fleet, GRAMMAR, n=128)
        beside = 0
        while not attacker.done() or not beside:
            answer = complete(fleet, PROMPT, max_tokens=60)["choices"][0]
            assert answer["token_ids"] == alone
            beside += 1
        response = attacker.result()
    assert response.status_code == 400, response.text[:500]
    error = response.json()["error"]
    assert error["code"] == "grammar_too_slow"
    assert error["type"] == "invalid_request_error"
    assert slow_grammars(fleet) > 0


def test_a_stream_that_has_begun_ends_with_an_error_event_and_a_line_in_the_log(
    fleet: Fleet,
) -> None:
    """The line names the request, and its caller's trace."""
    trace_id = "5" * 32
    headers = {"traceparent": f"00-{trace_id}-{'6' * 16}-01"}
    response = attack(fleet, LATE_GRAMMAR, headers, n=2, stream=True)
    assert response.status_code == 200
    lines = [each for each in response.text.split("\n") if each.startswith("data: ")]
    events = [json.loads(each.removeprefix("data: ")) for each in lines]
    assert len(events) > 2, "some digits came"
    assert events[-1]["error"]["code"] == "grammar_too_slow"
    waits = sum(each["mask_waits"] for each in all_counters(fleet).values())
    assert waits > 0
    logged = map(json.loads, fleet.processes["decode-1"].log_path.read_text().splitlines())
    told = [each for each in logged if each.get("trace_id") == trace_id]
    request_id = response.headers["x-baton-request-id"]
    failed = [each["request_id"] for each in told]
    assert 0 < len(failed) == len({*failed}), "one line for each choice that failed"
    assert {*failed} <= {f"{request_id}-0", f"{request_id}-1"}
    for each in told:
        assert each["who"] == "decode-1"
        assert "failed" in each["message"]
