"""The router's benchmark: its mock workers are a fleet to a real router, and its client counts."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import msgspec
import pytest

from bench.router.calls import CountedFleet
from bench.router.costs import MAX_CONTEXT, PATH
from bench.router.mock_fleet import RouterFleet, RouterFleetConfig
from bench.tools.http_load import LoadResult, post, run_load
from protocol.messages import Role
from tests.effort import some
from tests.integration.reference import DEMO_MODEL

MOST_CALLS = 580
"""Calls of Python functions for a plain request with one token of output, and a few per cent more.
Lower these bounds when requests get cheaper."""
MOST_CALLS_PER_TOKEN = 32


@pytest.fixture(scope="module", params=some([(Role.PREFILL, Role.DECODE), (Role.DECODE,)], 1))
def fleet(request: pytest.FixtureRequest) -> Iterator[CountedFleet]:
    with CountedFleet(RouterFleetConfig(DEMO_MODEL, request.param, [5, 6, 7], MAX_CONTEXT)) as made:
        yield made


def _load(fleet: RouterFleet, count: int, **fields: object) -> LoadResult:
    words = "a prompt of more tokens than a decode worker prefills by itself, " * 10
    return _send(fleet, words, 4, count, **fields)


def _send(
    fleet: RouterFleet, words: str, concurrency: int, count: int, **fields: object
) -> LoadResult:
    body = {"model": fleet.model_name, "messages": [{"role": "user", "content": words}], **fields}
    data = post(PATH, "localhost", msgspec.json.encode(body))
    return asyncio.run(run_load(fleet.targets, [data], concurrency, count, keeps_ids=True))


def _calls(fleet: CountedFleet, count: int, **fields: object) -> int:
    """The router's calls for each of `count` short requests, sent one after the other: the least of
    several runs, because a slow machine does more of its regular work during the requests."""

    def send() -> None:
        assert not _send(fleet, "Who wrote Hamlet?", 1, count, **fields).errors

    return min(fleet.calls(send, count).total() for _ in range(3))


def test_whole_answers_are_counted_and_cost_cpu_time(fleet: RouterFleet) -> None:
    before = fleet.usage()
    result = _load(fleet, 40, max_tokens=3)
    assert (result.requests, result.errors, result.events) == (40, [], 0)
    assert len({*result.ids}) == len(result.latencies_s) == 40
    assert fleet.usage().cpu_s > before.cpu_s


def test_every_token_of_a_stream_is_an_event(fleet: RouterFleet) -> None:
    result = _load(fleet, 12, max_tokens=20, stream=True)
    assert (result.requests, result.errors, result.events) == (12, [], 12 * 20)


def test_a_request_and_a_token_cost_no_more_calls_than_they_did(fleet: CountedFleet) -> None:
    """Each small addition to the path of every request costs too little to be seen in seconds."""
    request = _calls(fleet, 50, max_tokens=1)
    assert 0.9 * MOST_CALLS < request <= MOST_CALLS
    short, long = (_calls(fleet, 10, max_tokens=num, stream=True) for num in (10, 50))
    token = (long - short) / 40
    assert 0.9 * MOST_CALLS_PER_TOKEN < token <= MOST_CALLS_PER_TOKEN


def test_errors_are_told(fleet: RouterFleet) -> None:
    result = _load(fleet, 2, max_tokens=0)
    assert [each.split()[1] for each in result.errors] == ["400", "400"]


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"])
async def test_a_connection_that_breaks_is_an_error(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, family=socket.AF_INET)
    async with server:
        target = server.sockets[0].getsockname()
        result = await run_load([target], [post("/", "x", b"")], 1, 1)
    assert len(result.errors) == 1
    assert result.errors[0].startswith("the connection broke")
