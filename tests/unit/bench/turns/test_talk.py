"""One client's side of a conversation, with a server whose answers are known."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from bench.tools.raw_stream import RawStream
from bench.turns.conversations import Conversation, Turn
from bench.turns.talk import Talk, _read
from gateway.text.tokenizer import Tokenizer
from protocol.errors import BatonError
from tests.unit.gateway.api_harness import MODEL, LiveApi, write_checkpoint


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveApi]:
    path = write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    tokenizer = Tokenizer(path)
    with LiveApi(path, tokenizer, max_context=4000) as live:
        live.says("Hello")
        yield live
        live.generator.wait_idle()
    tokenizer.close()


def talked(api: LiveApi, *turns: Turn) -> list[str]:
    """The texts of all prompts of a conversation."""
    api.generator.requests.clear()
    conversation = Conversation("c", turns, seed=1)
    results = asyncio.run(Talk(api.port, MODEL, 0.2).hold(conversation))
    prompts = [each.token_ids for each in api.generator.requests]
    assert [each.prompt for each in results] == prompts
    assert [each.number for each in results] == list(range(len(turns)))
    assert all(each.cached_tokens == 2 and each.ttft_ms > 0 for each in results)
    assert {api.tokenizer.decode(list(each.answer)) for each in results} == {"Hello"}
    return [api.tokenizer.decode(list(each), skip_special_tokens=False) for each in prompts]


def test_each_turn_repeats_the_ones_before(api: LiveApi) -> None:
    first, second, third = talked(api, Turn(50, 8), Turn(10, 8), Turn(10, 8))
    assert second.startswith(f"{first}Hello<|end|>\n<|start|>user\n")
    assert third.startswith(f"{second}Hello<|end|>\n<|start|>user\n")


def test_a_cut_history_keeps_whole_turns(api: LiveApi) -> None:
    turns = Turn(50, 8), Turn(10, 8), Turn(10, 8, kept_tokens=60)
    first, second, third = talked(api, *turns)
    assert third.startswith(f"{first}Hello<|end|>\n<|start|>user\n")
    assert not third.startswith(second)


def test_a_refusal_ends_the_program(api: LiveApi) -> None:
    too_long = Conversation("c", (Turn(50, 8000),), seed=1)
    with pytest.raises(BatonError, match="context"):
        asyncio.run(Talk(api.port, MODEL, 0.2).hold(too_long))


def test_an_error_in_a_stream_is_the_message() -> None:
    error = b'HTTP/1.1 200 OK\r\n\r\ndata: {"error": {"message": "no room"}}\n\n'
    stream = RawStream([error], [0.0])
    with pytest.raises(BatonError, match=r"c: the server said .*no room"):
        _read(stream, "c", 0)


@pytest.mark.parametrize("takes_seeds", [True, False])
def test_each_turn_has_its_seed_if_the_server_takes_one(api: LiveApi, takes_seeds: bool) -> None:
    api.generator.requests.clear()
    talk = Talk(api.port, MODEL, 0.2, takes_seeds=takes_seeds)
    asyncio.run(talk.hold(Conversation("c", (Turn(50, 8), Turn(10, 8)), seed=5)))
    seeds = [each.sampling.seed for each in api.generator.requests]
    assert (seeds == [5, 6]) == takes_seeds
