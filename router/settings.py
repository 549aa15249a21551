"""Settings of routing: requests in flight, attempts and their pauses, connections to workers."""

from __future__ import annotations

from dataclasses import dataclass

from process.settings import setting
from process.settings.shared import SharedSettings

BY_CACHE, BY_LOAD = PLACEMENTS = ("cache", "load")
ON, OFF = "on", "off"


@dataclass(frozen=True, kw_only=True)
class RoutingSettings(SharedSettings):
    """Settings of the code that chooses workers and follows requests there."""

    kv_fetch: str = setting(
        ON,
        help="whether workers fetch leading blocks of a prompt from workers that have them cached, "
        "where that is quicker than computing them",
        choices=(ON, OFF),
    )
    local_prefill_threshold_tokens: int | None = setting(
        None,
        help="deprecated, and ignored by the next release: most tokens of a prompt that a decode "
        "worker prefills itself; none: the cost of a placement decides",
        unit="tokens",
        minimum=0,
    )
    placement: str = setting(
        BY_CACHE,
        help="how workers are chosen; cache: by load and by the blocks of the prompt that they "
        "hold; load: by load alone, for workers that fetch each other's blocks",
        choices=PLACEMENTS,
    )
    max_inflight: int = setting(
        1024,
        help="sequences at once; requests for more are answered 503, before their body is read. "
        "Where there are several API keys, one has at most half of them, unless its line in the "
        "key file says otherwise; without keys, an address leaves some to other addresses",
        unit="sequences",
        minimum=1,
    )

    request_timeout_s: float = setting(
        600.0, help="longest that a generation may take", unit="s", minimum=0.1
    )
    max_attempts: int = setting(
        4,
        help="attempts at a generation without a new token before it fails",
        unit="attempts",
        minimum=1,
    )
    retry_backoff_ms: float = setting(
        20.0, help="wait before the second attempt; doubles with each", unit="ms", minimum=0
    )
    retry_backoff_max_ms: float = setting(
        1000.0, help="longest wait between two attempts", unit="ms", minimum=0
    )
    recovery_wait_s: float = setting(
        15.0,
        help="how long a generation whose workers died waits for a decode worker",
        unit="s",
        minimum=0,
    )
    resume_wait_s: float = setting(
        2.0,
        help="how long the router asks decode workers for a stream that its client resumes, "
        "before it generates the stream again",
        unit="s",
        minimum=0,
    )
    first_token_wait_s: float = setting(
        2.0,
        help="how long a decode worker's tokens wait for the first token, which comes from the "
        "prefill worker",
        unit="s",
        minimum=0.01,
    )
    max_unread_deltas: int = setting(
        8192,
        help="pieces of a generation that wait for a slow client before it is given up",
        unit="pieces",
        minimum=1,
    )

    expected_cache_s: float = setting(
        10.0,
        help="how long the blocks of a routed prompt are expected to appear in the worker's cache",
        unit="s",
        minimum=0,
    )
    ping_interval_s: float = setting(
        1.0, help="time between two pings of a worker", unit="s", minimum=0.05
    )
    silence_s: float = setting(
        2.0,
        help="silence after which a worker gets no new requests while others answer",
        unit="s",
        minimum=0.1,
    )
    trace_history: int = setting(
        1000, help="finished generations whose traces are kept", unit="generations", minimum=1
    )
    record_trace: str | None = setting(
        None,
        help="file in which each request leaves a line for simulations and replays: times, numbers "
        "of tokens and digests, no text; none: nothing is recorded",
    )
    record_trace_bytes: int = setting(
        256 << 20,
        help="most that the recording takes on disk; the oldest half is dropped when it is full",
        unit="bytes",
        minimum=1 << 16,
    )
