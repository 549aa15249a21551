"""Answers in tokens that the tokenizer would not choose, and memories for them."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from gateway.history.answers import AnswerMemory, AnswerMetrics, AnswerStore
from gateway.history.remembered import Remembered
from gateway.history.seal import Seal
from gateway.text.tokenizer import Tokenizer

SECRET = "the cluster's secret"
MAX_BYTES = 1 << 20
TTL_S = 3600.0


def memory(
    tokenizer: Tokenizer,
    store: AnswerStore | None = None,
    secret: str = SECRET,
    clock: Callable[[], float] = lambda: 0.0,
) -> AnswerMemory:
    """An empty memory."""
    remembered = Remembered(MAX_BYTES, TTL_S, clock)
    metrics = AnswerMetrics(CollectorRegistry())
    return AnswerMemory(tokenizer, Seal(secret, "model"), remembered, metrics, store)


def single_bytes(tokenizer: Tokenizer, text: str) -> list[int]:
    """A text as one token for each of its bytes."""
    found = ((tokenizer.token_bytes(id_), id_) for id_ in range(tokenizer.vocab_size))
    by_byte = {data[0]: id_ for data, id_ in found if len(data) == 1}
    return [by_byte[byte] for byte in text.encode()]
