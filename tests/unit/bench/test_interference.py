"""The interference benchmark's client and its arithmetic, on a server that answers by the clock."""

from __future__ import annotations

import pytest

from bench.interference import Contestant, Result, quantile, ratios, report
from bench.tools.stream_load import Phase, StreamClient, StreamLoad
from protocol.errors import BatonError
from tests.unit.bench.engine.answering_server import StreamingServer

LOAD = StreamLoad(
    model="m",
    vocab_size=100,
    num_streams=3,
    stream_prompt=5,
    stream_tokens=8,
    long_prompt=40,
    arrivals_per_s=50.0,
)


async def test_both_loads_are_sent_and_counted():
    for quiet_s in (0.1, 1.0, 10.0, 60.0):  # as long as this machine takes to send some tokens
        async with StreamingServer() as server:
            quiet, disturbed = await StreamClient(server.url, LOAD).run(0.0, quiet_s, 3 * quiet_s)
        if quiet.gaps_s and disturbed.gaps_s:
            break
    long = [body for body in server.bodies if len(body["prompt"]) == LOAD.long_prompt]
    assert len(long) == disturbed.num_sent == len(disturbed.ttft_s) > 0
    assert quiet.num_sent == 0
    assert not quiet.ttft_s
    for phase in (quiet, disturbed):
        assert phase.stream_tokens >= len(phase.gaps_s) > 0
        assert all(gap > 0 for gap in phase.gaps_s)
    assert {len(body["prompt"]) for body in server.bodies} == {5, 40}
    assert all(body["ignore_eos"] and body["stream"] for body in server.bodies)


async def test_the_load_is_a_function_of_its_seed():
    prompts = []
    for _ in range(2):
        async with StreamingServer() as server:
            await StreamClient(server.url, LOAD).run(0.0, 0.02, 0.1)
        long = [body["prompt"] for body in server.bodies if len(body["prompt"]) == 40]
        prompts.append(sorted(long))  # each comes over a connection of its own
    assert prompts[0] == prompts[1] != []


async def test_a_refusal_ends_the_run():
    async with StreamingServer("503 Service Unavailable") as server:
        with pytest.raises(BatonError, match="503"):
            await StreamClient(server.url, LOAD).run(60.0, 0.0, 0.0)


async def test_a_server_that_is_not_there_ends_the_run():
    async with StreamingServer() as server:
        pass
    with pytest.raises(BatonError, match="a connection broke"):
        await StreamClient(server.url, LOAD).run(60.0, 0.0, 0.0)


def test_quantiles_and_ratios():
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 3.0
    assert quantile([1.0], 0.99) == 1.0
    results = []
    for name, gap_s in (("a", 0.5), ("b", 0.1), ("c", 0.012)):
        quiet = Phase(10.0, gaps_s=[0.01] * 50)
        disturbed = Phase(10.0, [gap_s] * 50, [0.3] * 4, stream_tokens=500, prompt_tokens=1000)
        results.append(Result(Contestant(name, name, 0, ()), [(quiet, disturbed)]))
    first, second = ratios(results)
    assert "(a) over (b) 5.0x, (a) over (c) 41.7x, (c) over undisturbed 1.20x" in first
    assert "(b) over (a) 1.00x" in second
    assert report(results, 200.0, 50.0).row_count == 3
