"""What a router can be told; the same by flag, `BATON_` variable and file.

Holds what the operator says. What the fleet says (context, fingerprints, block size) comes from
the workers' registrations.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.hashing import DEFAULT_SEED
from runtime.settings import setting
from runtime.worker_settings import NAME_PATTERN


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """Settings of one router process."""

    model: str = setting(help="folder of the checkpoint whose tokenizer and chat template serve")
    served_model_name: str | None = setting(
        None, help="name under which the model is served; none: the folder's name"
    )

    host: str = setting("127.0.0.1", help="address to serve HTTP on", pattern=r"\S+")
    port: int = setting(
        8000, help="port to serve HTTP on; 0: any free one", minimum=0, maximum=65535
    )
    port_file: str | None = setting(
        None, help="file to write the chosen HTTP port into, once requests are accepted"
    )

    redis_url: str = setting(
        help="Redis or Valkey that holds the fleet, as redis://[:password@]host:port[/db]",
        pattern=r"(rediss?|unix)://.+",
        secret=True,
    )
    cluster: str = setting(
        "default", help="name of the fleet within that Redis", pattern=NAME_PATTERN
    )
    hash_seed: str = setting(
        DEFAULT_SEED, help="seed of the block hashes; one value for the whole fleet"
    )

    local_prefill_threshold_tokens: int = setting(
        64,
        help="most tokens of a prompt that a decode worker prefills itself; 0: only without "
        "prefill workers",
        unit="tokens",
        minimum=0,
    )
    max_inflight: int = setting(
        1024, help="generations at once; more are answered 503", unit="generations", minimum=1
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
    first_token_wait_s: float = setting(
        2.0,
        help="how long a decode worker's tokens wait for the prefill worker's first one",
        unit="s",
        minimum=0.01,
    )
    expected_cache_s: float = setting(
        10.0, help="how long a routed prompt counts as soon to be cached", unit="s", minimum=0
    )

    ping_interval_s: float = setting(
        1.0, help="time between two pings of a worker", unit="s", minimum=0.05
    )
    silence_s: float = setting(
        2.5,
        help="silence after which a worker gets no new requests while others answer",
        unit="s",
        minimum=0.1,
    )
    shutdown_grace_s: float = setting(
        10.0, help="how long a stopping router lets its streams finish", unit="s", minimum=0
    )

    trace_history: int = setting(
        1000, help="finished generations whose traces are kept", unit="generations", minimum=1
    )
    parent_pid: int | None = setting(
        None, help="stop when this process, our parent, is gone", unit="pid", minimum=1
    )
    log_level: str = setting(
        "info",
        help="least severe log lines to write",
        choices=("debug", "info", "warning", "error"),
    )
    log_format: str = setting(
        "text", help="log lines for people or as JSON", choices=("text", "json")
    )
