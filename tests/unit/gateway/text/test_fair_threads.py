"""Threads in fair turns: long work lets others in, and a thread's place is free when it is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from gateway.text import fair_threads
from gateway.text.fair_threads import FairThreads, Steps, all_steps
from gateway.text.tokenizer import Tokenizer
from http_kit.caller import CURRENT_ORIGIN, Origin
from tests.unit.gateway.api_harness import TIMEOUT_S


@pytest.fixture
def threads() -> Iterator[FairThreads]:
    made = FairThreads(1, 0.0, "test")
    yield made
    made.close()


async def test_others_have_turns_between_the_slices_of_long_work(
    threads: FairThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair_threads, "SLICE_S", 0.0)
    seen: list[str] = []
    goes_on = threading.Semaphore(0)

    def steps() -> Steps[str]:
        for _ in range(10):
            assert goes_on.acquire(timeout=TIMEOUT_S)
            seen.append("step")
            yield
        return "done"

    CURRENT_ORIGIN.set(Origin(0, share="long"))
    long = asyncio.ensure_future(threads.run_steps(steps(), 10))
    await asyncio.sleep(0)
    CURRENT_ORIGIN.set(Origin(0, share="short"))
    short = asyncio.ensure_future(threads.run(lambda: seen.append("short"), 1))
    await asyncio.sleep(0)
    goes_on.release(11)
    assert await long == "done"
    await short
    assert seen.index("short") == 1
    CURRENT_ORIGIN.set(None)


async def test_errors_of_a_step_are_those_of_the_work(threads: FairThreads) -> None:
    def steps() -> Steps[None]:
        yield
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await threads.run_steps(steps(), 1)
    with pytest.raises(ValueError, match="no"):
        all_steps(steps())
    assert await threads.run(lambda: 7, 1) == 7


async def test_the_place_of_cancelled_work_is_free_when_its_thread_is(threads: FairThreads) -> None:
    begun, ends = threading.Event(), threading.Event()
    order: list[str] = []

    def work() -> None:
        begun.set()
        assert ends.wait(TIMEOUT_S)
        order.append("cancelled")
        raise ValueError("for nobody")

    running = asyncio.ensure_future(threads.run(work, 1))
    await asyncio.to_thread(begun.wait, TIMEOUT_S)
    following = asyncio.ensure_future(threads.run(lambda: order.append("following"), 1))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert threads.turnstile.num_waiting == 1, "the thread is still busy"
    ends.set()
    await following
    assert order == ["cancelled", "following"]


@pytest.mark.parametrize("piece_chars", [1, 7, 100])
def test_a_text_in_pieces_has_the_same_tokens(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, piece_chars: int
) -> None:
    text = "Hello world, hello there.  One two\n three 12 wörld a b c d <|start|> 'll do " * 20
    parts = [text, " two words", text]
    whole = [tokenizer.encode_parts(parts, special) for special in (True, False)]
    monkeypatch.setattr("gateway.text.tokenizer.PIECE_CHARS", piece_chars)
    monkeypatch.setattr("gateway.text.tokenizer.DECODED_AT_ONCE", piece_chars)
    assert [all_steps(tokenizer.encode_steps(parts, special)) for special in (True, False)] == whole
    assert sum(1 for _ in tokenizer.encode_steps(parts, False)) > 2
    assert all_steps(tokenizer.decode_steps(whole[1])) == tokenizer.decode(whole[1])
