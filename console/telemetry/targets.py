"""The targets in force; an operator may change them while the router runs."""

from __future__ import annotations

from dataclasses import dataclass

from console.settings import ConsoleSettings
from router.requests.interface import TEST_PREFIX
from router.requests.trace import Durations, RequestTrace


@dataclass
class Targets:
    """Targets of a request: its first token, its time per output token, and the share of requests
    that should meet both. `tpot_target_ms` None: the workers' target."""

    ttft_target_ms: float
    tpot_target_ms: float | None
    goodput_target: float

    @classmethod
    def of(cls, settings: ConsoleSettings) -> Targets:
        """The targets in the settings."""
        return cls(settings.ttft_target_ms, settings.tpot_target_ms, settings.goodput_target)

    def is_good(
        self, trace: RequestTrace, durations: Durations, tpot_target_ms: float | None
    ) -> bool | None:
        """Whether an ended request with these durations met the targets. None for a request whose
        client left before that was known, and for an operator's test prompt."""
        if trace.request_id.startswith(TEST_PREFIX):
            return None
        if trace.outcome == "failed":
            return False
        ttft_ms = durations["ttft_ms"]
        if ttft_ms is None:
            waited_ms = (trace.finished_us - trace.received_us) / 1000
            return None if waited_ms < self.ttft_target_ms else False
        if ttft_ms > self.ttft_target_ms:
            return False
        if tpot_target_ms is None:
            return True
        tpot_ms = durations["tpot_ms"]
        return tpot_ms is None or tpot_ms <= tpot_target_ms
