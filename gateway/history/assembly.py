"""The router's memory of answers, as its settings say."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from gateway.history.answers import AnswerMemory, AnswerMetrics
from gateway.history.remembered import Remembered
from gateway.history.seal import Seal
from gateway.history.shared_answers import SharedAnswers
from gateway.settings import IN_STORE, OFF, GatewaySettings
from gateway.text.tokenizer import Tokenizer
from process.store.ignored_entries import IgnoredEntries
from process.store.response_records import ResponseRecords, Shelf
from process.store.store_url import store_url

SWEEP_S = 10.0
MOST_RECORDS = 1 << 16
"""The most answers of one tenant in the store."""


@dataclass(frozen=True, slots=True)
class RouterAnswers:
    """The memory of a router, with its housekeeping."""

    memory: AnswerMemory
    shared: SharedAnswers | None

    async def run(self) -> None:
        """Drop expired answers until cancelled, then close the connections to the store."""
        memory, shared = self.memory, self.shared
        try:
            if shared is not None:
                await shared.begin()
            while True:
                await asyncio.sleep(SWEEP_S)
                if shared is not None:
                    shared.note_other_routers()
                memory.remembered.sweep()
                memory.metrics.num_bytes.set(memory.remembered.num_bytes)
        finally:
            if shared is not None:
                await shared.records.close()


def router_answers(
    settings: GatewaySettings,
    tokenizer: Tokenizer,
    model: str,
    registry: CollectorRegistry,
    ignored: IgnoredEntries,
    has_others: Callable[[], bool],
) -> RouterAnswers | None:
    """The memory, if it is enabled. `model` is the fingerprint of the checkpoint's texts;
    `has_others` returns whether the cluster has other routers."""
    if settings.remember_answers == OFF:
        return None
    ttl_s, max_bytes = settings.remember_answers_s, settings.remember_answers_bytes
    seal = Seal(settings.cluster_secret, model)
    shared = None
    if settings.remember_answers == IN_STORE:
        shelf = Shelf("answers", ttl_s, MOST_RECORDS)
        records = ResponseRecords(
            store_url(settings), settings.cluster, max_bytes, time.monotonic, shelf
        )
        shared = SharedAnswers(records, seal, ignored, has_others, ttl_s)
    remembered = Remembered(max_bytes, ttl_s, time.monotonic)
    metrics = AnswerMetrics(registry)
    memory = AnswerMemory(tokenizer, seal, remembered, metrics, shared)
    return RouterAnswers(memory, shared)
