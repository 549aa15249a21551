"""The settings of a router, by flag, `BATON_` variable or file.

These are the operator's choices. The fleet's properties (context, fingerprints, block size) come
from the workers' registrations.
"""

from __future__ import annotations

from dataclasses import dataclass

from process.settings import setting, setting_of
from protocol.errors import ConfigError
from router.http.api_keys import KEY_PATTERN
from router.parser_names import AUTO, REASONING_PARSERS, TOOL_PARSERS
from worker.settings import WorkerSettings

DOORS = ("open", "api", "admin")


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """Settings of one router process."""

    model: str = setting(
        help="checkpoint whose tokenizer and chat template serve: a folder, or a hub id"
    )
    served_model_name: str | None = setting(
        None, help="name under which the model is served; none: the folder's name"
    )

    tool_parser: str = setting(
        AUTO,
        help="how the model writes tool calls; auto: as its checkpoint says",
        choices=TOOL_PARSERS,
    )
    reasoning_parser: str = setting(
        AUTO,
        help="how the model marks its reasoning; auto: as its checkpoint says",
        choices=REASONING_PARSERS,
    )

    host: str = setting("127.0.0.1", help="address to serve HTTP on", pattern=r"\S+")
    port: int = setting(
        8000, help="port to serve HTTP on; 0: any free one", minimum=0, maximum=65535
    )
    port_file: str | None = setting(
        None, help="file to write the chosen HTTP port into, once requests are accepted"
    )

    redis_url: str = setting_of(WorkerSettings, "redis_url")
    cluster: str = setting_of(WorkerSettings, "cluster")
    cluster_secret: str = setting_of(WorkerSettings, "cluster_secret")
    hash_seed: str = setting_of(WorkerSettings, "hash_seed")

    api_keys: tuple[str, ...] = setting(
        (),
        help="keys of clients; none here nor in api_key_file: the API is open",
        pattern=KEY_PATTERN,
        secret=True,
        flag=False,
    )
    api_key_file: str | None = setting(
        None, help="file with hashes of clients' keys, a line each, as `baton keys` makes them"
    )
    admin_keys: tuple[str, ...] = setting(
        (),
        help="keys of operators, for /fleet, /requests and all that is not the API",
        pattern=KEY_PATTERN,
        secret=True,
        flag=False,
    )
    admin_key_file: str | None = setting(None, help="file with hashes of operators' keys")
    supervisor_key: str | None = setting(
        None,
        help="one more key for operators' paths, held by the process that started this router",
        pattern=KEY_PATTERN,
        secret=True,
        flag=False,
    )
    health_access: str = setting(
        "open", help="whose keys /health and the other probes need, if there are any", choices=DOORS
    )
    metrics_access: str = setting(
        "admin", help="whose keys /metrics needs, if there are any", choices=DOORS
    )

    tls_cert_file: str | None = setting(
        None, help="PEM file with the certificate and its chain; none: plain HTTP"
    )
    tls_key_file: str | None = setting(
        None, help="PEM file with the certificate's key; none: it is in tls_cert_file"
    )
    max_head_bytes: int = setting(
        32 * 1024, help="longest request line and headers together", unit="bytes", minimum=1024
    )
    max_body_bytes: int = setting(
        32 * 1024 * 1024, help="longest body of a request", unit="bytes", minimum=1024
    )
    receive_timeout_s: float = setting(
        60.0, help="how long a client may take to send a request", unit="s", minimum=0.01
    )
    client_stall_s: float = setting(
        30.0,
        help="how long a client may leave a full buffer of its answer unread",
        unit="s",
        minimum=0.01,
    )
    keepalive_s: float = setting(
        15.0,
        help="silence in a stream, also before its first token, after which a comment is sent",
        unit="s",
        minimum=0.01,
    )
    max_unread_deltas: int = setting(
        8192,
        help="pieces of a generation that wait for a slow client before it is given up",
        unit="pieces",
        minimum=1,
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
    resume_wait_s: float = setting(
        2.0,
        help="how long decode workers are asked for a stream that its client resumes, before it is "
        "generated again",
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
        2.0,
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
    parent_pid: int | None = setting_of(WorkerSettings, "parent_pid")
    log_level: str = setting_of(WorkerSettings, "log_level")
    log_format: str = setting_of(WorkerSettings, "log_format")

    def __post_init__(self) -> None:
        if self.tls_key_file is not None and self.tls_cert_file is None:
            raise ConfigError("tls_key_file is of no use without tls_cert_file")
