"""Settings of `baton up`: the fleet's size, and those of its processes that are set most often.

Whatever a worker or router has beyond these is set by environment or file, which they read too.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.chat.parser_names import AUTO, REASONING_PARSERS, TOOL_PARSERS
from runtime.settings import setting
from runtime.worker_settings import NAME_PATTERN


@dataclass(frozen=True, kw_only=True)
class UpSettings:
    """What `baton up` can be told; None leaves a setting to the process it belongs to."""

    model: str = setting(help="folder of a Hugging Face checkpoint, or a hub id")
    served_model_name: str | None = setting(
        None, help="name under which the model is served; none: the folder's name or the hub id"
    )
    prefill: int = setting(
        1,
        help="prefill workers; 0: every decode worker prefills its own prompts (in a file: in "
        "the [up] table)",
        unit="workers",
        minimum=0,
    )
    decode: int = setting(
        1, help="decode workers (in a file: in the [up] table)", unit="workers", minimum=1
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
    redis_url: str | None = setting(
        None,
        help="Redis or Valkey that holds the fleet; none: one is started, and stopped with it",
        pattern=r"(rediss?|unix)://.+",
        secret=True,
    )
    cluster: str = setting(
        "default", help="name of the fleet within that Redis", pattern=NAME_PATTERN
    )
    cluster_secret: str | None = setting(
        None,
        help="secret by which the fleet's processes know each other; none: a random one",
        pattern=r"(?s).{16,}",
        secret=True,
        flag=False,
    )

    api_key_file: str | None = setting(
        None, help="file with hashes of clients' keys, as `baton keys` makes them; none: see router"
    )
    admin_key_file: str | None = setting(None, help="file with hashes of operators' keys")

    tls_cert_file: str | None = setting(
        None, help="PEM file with the certificate and its chain; none: plain HTTP"
    )
    tls_key_file: str | None = setting(
        None, help="PEM file with the certificate's key; none: it is in tls_cert_file"
    )

    device: str = setting(
        "auto",
        help="device of the workers: auto, cpu, cuda or cuda:N",
        pattern=r"auto|cpu|cuda(:\d+)?",
    )
    dtype: str = setting(
        "auto",
        help="type of weights and KV cache; auto: the checkpoint's",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    weights: str = setting(
        "auto",
        help="auto: as dtype says; int8, int4: rounded to integers at load (bfloat16 on a CPU); "
        "fp8: e4m3, and so the inputs of products (bfloat16 on a card)",
        choices=("auto", "int8", "int4", "fp8"),
    )
    kv_dtype: str = setting(
        "auto",
        help="what KV blocks hold; auto: as dtype says; fp8: e4m3, half of it (on a card, with "
        "FlashInfer)",
        choices=("auto", "fp8"),
    )
    transport: str = setting("auto", help="how KV blocks move", choices=("auto", "nixl", "shm"))
    torch_threads: int | None = setting(
        None,
        help="CPU threads of each worker; none: the cores, shared evenly",
        unit="threads",
        minimum=1,
    )
    block_size: int = setting(16, help="tokens in a KV block", unit="tokens", minimum=1)
    num_blocks: int | None = setting(
        None, help="KV blocks of each worker; none: from memory_fraction", unit="blocks", minimum=1
    )
    memory_fraction: float | None = setting(
        None,
        help="part of the available memory that each worker's KV pool may take, up to what a full "
        "batch at full context needs; none: a share of it",
        minimum=0.01,
        maximum=0.95,
    )
    max_context: int | None = setting(
        None,
        help="longest prompt and output together; none: the model's own limit",
        unit="tokens",
        minimum=2,
    )
    max_batch_size: int = setting(
        64, help="sequences that run at once on a worker", unit="sequences", minimum=1
    )
    chunk_min_tokens: int = setting(
        16,
        help="fewest prompt tokens that a step computes while others decode",
        unit="tokens",
        minimum=1,
    )
    chunk_max_tokens: int = setting(
        512, help="most prompt tokens that a step computes", unit="tokens", minimum=1
    )
    itl_target_ms: float = setting(
        50.0,
        help="inter-token latency that chunks beside running decodes keep to",
        unit="ms",
        minimum=0.1,
    )
    local_prefill_threshold_tokens: int = setting(
        64,
        help="most tokens of a prompt that a decode worker prefills itself",
        unit="tokens",
        minimum=0,
    )
    kv_checksum: bool = setting(False, help="send and compare a digest of every KV block")

    restart: bool = setting(True, help="start a process anew when it ends unexpectedly")
    startup_timeout_s: float = setting(
        600.0, help="how long the fleet may take until it serves", unit="s", minimum=1
    )
    stop_grace_s: float = setting(
        20.0, help="how long router and workers may take to stop, each", unit="s", minimum=0.1
    )
    log_dir: str | None = setting(
        None, help="folder for the processes' logs; none: a temporary one"
    )
    log_level: str = setting(
        "info",
        help="least severe log lines to write",
        choices=("debug", "info", "warning", "error"),
    )
