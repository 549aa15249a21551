"""Settings of the gateway: where it listens, whom it admits, how it reads and answers requests."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.admission.api_keys import KEY_PATTERN
from gateway.parser_names import AUTO, CONTROL_TOKENS, ESCAPE, REASONING_PARSERS, TOOL_PARSERS
from process.settings import setting
from process.settings.shared import SharedSettings
from protocol.errors import ConfigError

DOORS = ("open", "api", "viewer", "admin")
OFF, IN_ROUTER, IN_STORE = REMEMBER_ANSWERS = ("off", "router", "store")
UNKNOWN_FIELDS = ("ignore", "refuse")


@dataclass(frozen=True, kw_only=True)
class GatewaySettings(SharedSettings):
    """Settings of what clients talk to."""

    host: str = setting("127.0.0.1", help="address to serve HTTP on", pattern=r"\S+")
    port: int = setting(
        8000, help="port to serve HTTP on; 0: any free one", minimum=0, maximum=65535
    )
    port_file: str | None = setting(
        None, help="file to write the chosen HTTP port into, once requests are accepted"
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
        help="how control tokens, such as <|im_end|>, in the text of messages are read; escape: "
        "as text; allow: as control tokens, even in text that a user wrote",
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
        help="memory of the store that kept responses may take; beyond it, the oldest responses "
        "of the key that keeps the most are dropped",
        unit="bytes",
        minimum=16 * 1024 * 1024,
    )

    remember_answers: str = setting(
        IN_STORE,
        help="where to remember the token ids of answers that the tokenizer would encode "
        "differently, so that the cached blocks of an answer serve the conversation's next "
        "turn; router: in each router's memory; store: also in Redis or Valkey, encrypted, "
        "for all routers",
        choices=REMEMBER_ANSWERS,
    )
    remember_answers_bytes: int = setting(
        16 * 1024 * 1024,
        help="memory that remembered answers may take in each router, and once more in the "
        "store; beyond it, the oldest answers of the tenant with the most are dropped",
        unit="bytes",
        minimum=64 * 1024,
    )
    remember_answers_s: int = setting(
        3600, help="how long an answer is remembered", unit="s", minimum=1, maximum=24 * 3600
    )

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
        "their keys; each line is a JSON object with prompt, or with messages and tools, "
        "like a body of /tokenize",
    )
    admin_keys: tuple[str, ...] = setting(
        (),
        help="keys of operators, for /fleet, /requests and all that is not the API",
        pattern=KEY_PATTERN,
        secret=True,
        flag=False,
    )
    admin_key_file: str | None = setting(None, help="file with hashes of operators' keys")
    viewer_keys: tuple[str, ...] = setting(
        (),
        help="keys that open what operators read, /metrics included, and no control",
        pattern=KEY_PATTERN,
        secret=True,
        flag=False,
    )
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
        "viewer",
        help="whose keys /metrics needs, if there are any; what a viewer's key opens, an admin key "
        "opens, too",
        choices=DOORS,
    )

    allowed_hosts: tuple[str, ...] = setting(
        (),
        help="names without port under which clients reach the router, besides IP addresses and "
        "localhost; requests for other names are refused; *.NAME: every name with this "
        "ending; *: any name; none: names are checked only if there are no API keys",
        pattern=r"\*|\[[0-9A-Fa-f:.]+\]|(?:\*\.)?[A-Za-z0-9._\-]+",
    )
    root_path: str = setting(
        "",
        help="path under which a proxy shows the router, such as /llm, and which the proxy "
        "removes from requests; the router puts it before the paths in its answers",
        pattern=r"(?:/[A-Za-z0-9._~\-]+)*",
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        help="origins of web pages that may use the router, such as https://chat.example; *: any",
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
        16 * 1024 * 1024, help="longest body of a request", unit="bytes", minimum=1024
    )
    max_inflight_bytes: int = setting(
        512 * 1024 * 1024,
        help="memory that all requests together may hold: bodies, their fields, whole answers; "
        "requests beyond it are answered 503",
        unit="bytes",
        minimum=1024,
    )
    receive_timeout_s: float = setting(
        60.0,
        help="how long a client may take to send the head of a request",
        unit="s",
        minimum=0.01,
    )
    min_body_rate: int = setting(
        1024,
        help="what a client must send of a body per second, on average over 30 s (or over "
        "receive_timeout_s, if that is less); slower clients are answered 408",
        unit="bytes",
        minimum=1,
    )
    client_stall_s: float = setting(
        30.0,
        help="how long a client may leave a full buffer of its answer unread",
        unit="s",
        minimum=0.01,
    )
    idle_timeout_s: float = setting(
        75.0,
        help="how long a connection may stay open between two requests; must be longer than load "
        "balancers in front keep theirs open",
        unit="s",
        minimum=0.01,
    )
    keepalive_s: float = setting(
        15.0,
        help="silence in a stream, also before its first token, after which a comment is sent",
        unit="s",
        minimum=0.01,
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

    def __post_init__(self) -> None:
        if self.tls_key_file is not None and self.tls_cert_file is None:
            raise ConfigError("tls_key_file needs tls_cert_file")
        if self.max_inflight_bytes < self.max_body_bytes:
            raise ConfigError("max_inflight_bytes must be at least max_body_bytes")
