"""The memory of answers as a router's settings say."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from prometheus_client import CollectorRegistry

from gateway.history import assembly
from gateway.history.assembly import RouterAnswers, router_answers
from gateway.settings import IN_ROUTER, IN_STORE, OFF
from gateway.text.tokenizer import Tokenizer
from process.store.ignored_entries import IgnoredEntries
from router_process.settings import RouterSettings


def made(tokenizer: Tokenizer, where: str) -> RouterAnswers | None:
    settings = RouterSettings(
        model="unused",
        redis_url="unix:///nowhere",
        cluster_secret="s" * 16,
        remember_answers=where,
        remember_answers_s=7,
    )
    return router_answers(
        settings, tokenizer, "model", CollectorRegistry(), IgnoredEntries(), lambda: False
    )


def test_a_flag_turns_it_off(tokenizer: Tokenizer) -> None:
    assert made(tokenizer, OFF) is None
    alone = made(tokenizer, IN_ROUTER)
    assert alone is not None
    assert alone.memory.store is None
    shared = made(tokenizer, IN_STORE)
    assert shared is not None
    assert shared.memory.store is shared.shared is not None


@pytest.mark.parametrize("where", [IN_ROUTER, IN_STORE])
async def test_what_is_too_old_goes_although_nobody_asks(
    tokenizer: Tokenizer, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "SWEEP_S", 0.0)
    answers = made(tokenizer, where)
    assert answers is not None
    swept = asyncio.Event()
    monkeypatch.setattr(type(answers.memory.remembered), "sweep", lambda self: swept.set())
    task = asyncio.create_task(answers.run())
    await asyncio.wait_for(swept.wait(), 10)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    if answers.shared is not None:
        assert answers.shared.asks, "a store that is away may have answers"
