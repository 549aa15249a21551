"""The dependencies of every endpoint; created once per application."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.types import Scope

from gateway.admission.shared_prefixes import SharedPrefixes
from gateway.api.checkpoint_defaults import SamplingDefaults
from gateway.chat.markup import ChatMarkup
from gateway.grammars.grammar_checker import GrammarChecker
from gateway.history.answers import AnswerMemory
from gateway.http.connection_limits import MAX_BODY_BYTES
from gateway.http.request_scope import record_of
from gateway.metrics import ApiMetrics
from gateway.text.tokenizer import Tokenizer
from protocol.errors import InvalidRequest
from router.requests.interface import Generator, ServedModel, TimingLookup

_T = TypeVar("_T")
MAX_INLINE_BYTES = 64 * 1024
"""Longer bodies are validated and converted in a thread."""


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """Limits of one HTTP request: its total time in seconds, its body in bytes.

    `keepalive_s`: how long a stream may be silent before a keep-alive comment is sent.
    `max_inflight_bytes`: memory that all requests hold together, see `gateway.http.byte_budget`.
    `refuse_unknown`: whether a field that would be ignored is an error.
    """

    request_timeout_s: float = 600.0
    max_body_bytes: int = MAX_BODY_BYTES
    keepalive_s: float = 15.0
    max_inflight_bytes: int = 512 * 1024 * 1024
    refuse_unknown: bool = False


def no_timing(request_id: str) -> None:
    """The timing of a generation without traces."""


@dataclass(frozen=True, slots=True)
class ApiContext:
    """The parts behind the API. Nothing here changes after startup.

    `ids_key` is the key that authenticates streams' event ids, see `gateway.output.event_ids`.
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
    timing_of: TimingLookup = no_timing
    shared_prefixes: SharedPrefixes = field(default_factory=SharedPrefixes)
    answers: AnswerMemory | None = None

    def ignore(self, scope: Scope, params: Sequence[str], why: str) -> None:
        """Name fields that this model cannot honour among the ignored ones. Raises InvalidRequest
        with the reason if such fields are refused."""
        if params and self.limits.refuse_unknown:
            raise InvalidRequest(f"'{params[0]}': {why}", params[0])
        self.name_ignored(scope, params)

    def name_ignored(self, scope: Scope, names: Sequence[str]) -> None:
        """Name fields of a request that are not honoured."""
        record = record_of(scope)
        record.ignored = (*record.ignored, *names)
        self.metrics.ignored_fields.inc(len(names))

    async def convert(self, scope: Scope, work: Callable[[], _T]) -> _T:
        """The result of `work`, which converts fields of a request: in a thread if the request's
        body is large. Call it after the body was read."""
        num_bytes = record_of(scope).body_bytes
        if num_bytes <= MAX_INLINE_BYTES:
            return work()
        return await self.tokenizer.in_turn(work, num_bytes)
