"""The dependencies of every endpoint; created once per application."""

from __future__ import annotations

from dataclasses import dataclass

from router.api.sampling_defaults import SamplingDefaults
from router.api.timing import TraceLookup
from router.chat.markup import ChatMarkup
from router.http.metrics import ApiMetrics
from router.requests.interface import Generator, ServedModel
from router.text.grammar import GrammarChecker
from router.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """Limits of one HTTP request: its total time in seconds, its body in bytes.

    `keepalive_s`: how long a stream may be silent before a keep-alive comment is sent.
    """

    request_timeout_s: float = 600.0
    max_body_bytes: int = 32 * 1024 * 1024
    keepalive_s: float = 15.0


def no_traces(request_id: str) -> None:
    """The trace lookup of a generator that keeps no traces."""


@dataclass(frozen=True, slots=True)
class ApiContext:
    """The parts behind the API. Nothing here changes after startup.

    `ids_key` is the key that authenticates streams' event ids, see `router.requests.event_ids`.
    """

    generator: Generator
    tokenizer: Tokenizer
    model: ServedModel
    defaults: SamplingDefaults
    metrics: ApiMetrics
    limits: ApiLimits
    markup: ChatMarkup
    grammars: GrammarChecker
    ids_key: bytes
    trace_of: TraceLookup = no_traces
