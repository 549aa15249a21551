"""Observations of a fleet that fails some of its requests, for tests of the doctor."""

from __future__ import annotations

import msgspec

from console.doctor.observation import MIN_REQUESTS, Observation, RequestFacts

GOOD = RequestFacts(received_us=1, num_prompt_tokens=10, ttft_ms=10.0, tpot_ms=5.0)
FAILED = msgspec.structs.replace(GOOD, outcome="failed")
SECOND = 1_000_000


def seen(now_s: float, failed: int = 0, **changes: object) -> Observation:
    """`failed` of the requests have failed; `changes` replace the other fields."""
    requests = (FAILED,) * failed + (GOOD,) * (MIN_REQUESTS - failed)
    whole = Observation(now_us=int(now_s * SECOND), requests=requests)
    return msgspec.structs.replace(whole, **changes)
