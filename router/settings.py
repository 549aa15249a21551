"""The settings of a router, by flag, `BATON_` variable or file.

These are the operator's choices. The fleet's properties (context, fingerprints, block size) come
from the workers' registrations.
"""

from __future__ import annotations

from dataclasses import dataclass

from process.settings import setting, setting_of
from protocol.errors import ConfigError
from router.admission.api_keys import KEY_PATTERN
from router.parser_names import AUTO, CONTROL_TOKENS, ESCAPE, REASONING_PARSERS, TOOL_PARSERS
from worker.settings import WorkerSettings

DOORS = ("open", "api", "admin")
UNKNOWN_FIELDS = ("ignore", "refuse")


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """Settings of one router process."""

    model: str = setting(
        help="checkpoint whose tokenizer and chat template serve: a folder, or a hub id"
    )
    revision: str | None = setting_of(WorkerSettings, "revision")
    served_model_name: tuple[str, ...] = setting_of(
        WorkerSettings,
        "served_model_name",
        help="names under which the model is served, the first of which answers carry; without "
        "any: the name that the workers give",
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
    control_tokens_in_text: str = setting(
        ESCAPE,
        help="what becomes of control tokens, as <|im_end|>, in the text of messages; escape: they "
        "are read as text; allow: they control the model, also in a text that a user wrote",
        choices=CONTROL_TOKENS,
    )

    unknown_fields: str = setting(
        "ignore",
        help="fields of requests that are unknown or not honoured: ignore them and name them in "
        "the answer's x-baton-ignored, or refuse the request",
        choices=UNKNOWN_FIELDS,
    )

    responses_store: bool = setting(
        False,
        help="keep the responses of /v1/responses, with their prompts, in Redis or Valkey for a "
        "day, at most 1,000 of each key, so that clients can continue, retrieve and cancel them",
    )
    responses_store_bytes: int = setting(
        128 * 1024 * 1024,
        help="memory of the store that kept responses may take; beyond it, the oldest ones of the "
        "key that keeps most make room",
        unit="bytes",
        minimum=16 * 1024 * 1024,
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
    shared_prefixes_file: str | None = setting(
        None,
        help="file with beginnings of prompts whose cached blocks all clients share, whatever "
        "their keys: a line each, as JSON, with prompt, or messages and tools, as /tokenize takes "
        "them",
    )
    admin_keys: tuple[str, ...] = setting(
        (),
        help="keys of operators, for /fleet, /requests and all that is not the API",
        pattern=KEY_PATTERN,
        secret=True,
        flag=False,
    )
    admin_key_file: str | None = setting(None, help="file with hashes of operators' keys")
    viewer_key_file: str | None = setting(
        None, help="file with hashes of keys that open what operators read, and no control"
    )
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

    allowed_hosts: tuple[str, ...] = setting(
        (),
        help="names under which clients reach the router, besides those of loopback, without port; "
        "requests for another host are refused; none: only checked on a loopback address without "
        "API keys; *: any",
        pattern=r"\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._\-]+",
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        help="origins of web pages that may use the router, as https://chat.example; *: any",
        pattern=r"\*|[a-z][a-z0-9+.\-]*://[^\s/,]+",
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
    max_inflight_bytes: int = setting(
        512 * 1024 * 1024,
        help="memory that all requests together may hold: bodies, their fields, whole answers; "
        "requests beyond it are answered 503",
        unit="bytes",
        minimum=1024,
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
    idle_timeout_s: float = setting(
        75.0,
        help="how long a connection may stay open between two requests; longer than load balancers "
        "in front keep theirs",
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
        1024,
        help="sequences at once; requests for more are answered 503, before their body is read. "
        "Where there are several API keys, one has at most half of them, unless its line in the "
        "key file says otherwise",
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
    lame_duck_s: float = setting(
        0.0,
        help="how long a router that is told to stop still takes connections and requests, while "
        "/ready is 503, so that load balancers leave it first; on Kubernetes 10 or more",
        unit="s",
        minimum=0,
    )
    shutdown_grace_s: float = setting(
        10.0, help="how long a stopping router lets its streams finish", unit="s", minimum=0
    )

    ttft_target_ms: float = setting(
        1000.0, help="target of the time to the first token", unit="ms", minimum=0.1
    )
    tpot_target_ms: float | None = setting(
        None,
        help="target of the time per output token; none: the workers' itl_target_ms",
        unit="ms",
        minimum=0.1,
    )
    goodput_target: float = setting(
        0.95,
        help="share of requests that are to meet both targets",
        minimum=0.0,
        maximum=1.0,
    )

    otlp_endpoint: str | None = setting(
        None,
        help="where to send traces over OTLP, as http://collector:4318/v1/traces; none: nowhere "
        "(needs the extra otlp)",
        pattern=r"https?://.+",
    )
    otlp_sample_ratio: float = setting(
        1.0,
        help="share of requests to trace of those whose clients send no traceparent",
        minimum=0.0,
        maximum=1.0,
    )
    vllm_metric_names: bool = setting(
        False, help="show the router's metrics under vLLM's names, too, for dashboards made for it"
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
        if self.max_inflight_bytes < self.max_body_bytes:
            raise ConfigError("max_inflight_bytes must be at least max_body_bytes")
