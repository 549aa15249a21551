"""The OpenAPI document: complete, the same as the routes, and true of what the server answers.

`python -m pytest tests/unit/gateway/api/test_openapi.py` with SCHEMA_EXAMPLES=2000 looks longer.
"""

from __future__ import annotations

import functools
import os

import hypothesis
import msgspec
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck
from openapi_spec_validator import validate
from prometheus_client import CollectorRegistry
from schemathesis.checks import CheckFunction
from schemathesis.specs.openapi import checks as openapi_checks

from console.endpoints.fleet import admin_router, doctor_router, flight_router
from console.telemetry.request_log import RequestLog
from gateway.api.body_reader import RequestBody
from gateway.api.openapi import openapi_document
from gateway.api.operations import OPERATIONS
from router.metrics import FleetMetrics
from router.requests.trace_store import TraceStore
from tests.effort import times
from tests.unit.gateway.api_harness import MODEL, LiveApi

EXAMPLES = int(os.environ.get("SCHEMA_EXAMPLES", times(5, 15)))
DOCUMENT = openapi_document()
OPERATORS = {each.path for each in OPERATIONS if each.tag == "operators"} - {"/metrics"}
PLAIN = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi"},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1]},
}


@functools.cache
def document_schema() -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_dict(DOCUMENT)


def no_fault_of_the_server(
    context: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case
) -> bool | None:
    """No status of 500 or more, but 504 where the request itself allows too little time."""
    if response.status_code == 504 and "x-request-timeout-ms" in case.headers:
        assert response.json()["error"]["code"] == "deadline_exceeded"
        return None
    return schemathesis.checks.not_a_server_error(context, response, case)


CHECKS: list[CheckFunction] = [
    no_fault_of_the_server,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
]


def test_the_document_is_valid_and_complete() -> None:
    validate(DOCUMENT)
    served = DOCUMENT["components"]["schemas"]
    for each in OPERATIONS:
        operation = DOCUMENT["paths"][each.path][each.method]
        assert ("requestBody" in operation) == (each.body is not None)
        assert ("200" in operation["responses"]) == (each.answer is not None)
        if each.body is not None:
            assert issubclass(each.body, RequestBody)
            assert set(served[each.body.__name__]["properties"]) == set(each.body.model_fields)
            assert served[each.body.__name__]["additionalProperties"] in (True, {})


def test_every_route_is_in_the_document_and_the_other_way_round(running_api: LiveApi) -> None:
    operators = FastAPI()
    traces = TraceStore(1, FleetMetrics(CollectorRegistry()), lambda: 0)
    operators.include_router(admin_router(None, RequestLog(traces)))
    operators.include_router(doctor_router(None, None))
    operators.include_router(flight_router(None))
    paths = running_api.app.openapi()["paths"] | operators.openapi()["paths"]
    served = {(method, path) for path, methods in paths.items() for method in methods}
    assert served == {(each.method, each.path) for each in OPERATIONS}


def test_openapi_json_and_docs(api: LiveApi) -> None:
    answer = api.http.get("/openapi.json")
    assert answer.json() == msgspec.json.decode(msgspec.json.encode(DOCUMENT))
    page = api.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "connect-src 'self'" in page.headers["content-security-policy"]
    assert "http" not in page.text, "it loads nothing from elsewhere"


@pytest.mark.parametrize(
    "path", sorted({each.path for each in OPERATIONS} - OPERATORS), ids=lambda path: path
)
def test_the_server_answers_as_the_document_says(running_api: LiveApi, path: str) -> None:
    running_api.reset()
    seen: set[int] = set()
    schema = document_schema()
    for method in DOCUMENT["paths"][path]:
        operation = schema[path][method.upper()]

        @hypothesis.settings(
            max_examples=EXAMPLES if operation.body else 3,
            deadline=None,
            derandomize="SCHEMA_EXAMPLES" not in os.environ,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(operation.as_strategy())
        def ask(case: schemathesis.Case) -> None:
            if isinstance(case.body, dict) and "model" in case.body:
                case.body["model"] = MODEL
            answer = case.call_and_validate(base_url=running_api.url, checks=CHECKS)
            seen.add(answer.status_code)

        ask()
        if path in PLAIN:  # random bodies with so many fields are hardly ever all right
            body = {"model": MODEL, **PLAIN[path]}
            case = operation.Case(body=body, media_type="application/json")
            seen.add(case.call_and_validate(base_url=running_api.url, checks=CHECKS).status_code)
        if operation.body:
            assert 200 in seen, "an answer was seen, too"
    running_api.generator.wait_idle()
