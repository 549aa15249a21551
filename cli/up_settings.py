"""Settings of `baton up`: the fleet's size, and the most used settings of its processes.

The latter are declared by their processes. All other settings of a worker or router are set by
environment or file, which each process reads itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from process.settings import setting, setting_of
from router_process.settings import RouterSettings
from worker.settings import WorkerSettings

TO_STDOUT = "stdout"


@dataclass(frozen=True, kw_only=True)
class UpSettings:
    """Settings of `baton up`; None leaves a setting to its process."""

    model: str = setting_of(WorkerSettings, "model")
    revision: str | None = setting_of(WorkerSettings, "revision")
    served_model_name: tuple[str, ...] = setting_of(WorkerSettings, "served_model_name")
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
    prefill_tensor_parallel: int = setting_of(
        WorkerSettings,
        "tensor_parallel",
        help="ranks that each prefill worker splits each layer over (in a file: in the [up] table)",
    )
    decode_tensor_parallel: int = setting_of(
        WorkerSettings,
        "tensor_parallel",
        help="ranks that each decode worker splits each layer over (in a file: in the [up] table)",
    )
    prefill_pipeline_parallel: int = setting_of(
        WorkerSettings,
        "pipeline_parallel",
        help="stages that each prefill worker splits the layers into (in a file: in the [up] "
        "table)",
    )
    decode_pipeline_parallel: int = setting_of(
        WorkerSettings,
        "pipeline_parallel",
        help="stages that each decode worker splits the layers into (in a file: in the [up] table)",
    )

    tool_parser: str = setting_of(RouterSettings, "tool_parser")
    reasoning_parser: str = setting_of(RouterSettings, "reasoning_parser")
    control_tokens_in_text: str = setting_of(RouterSettings, "control_tokens_in_text")
    responses_store: bool = setting_of(RouterSettings, "responses_store", default=True)

    host: str = setting_of(RouterSettings, "host")
    port: int = setting_of(RouterSettings, "port")
    redis_url: str | None = setting_of(
        RouterSettings,
        "redis_url",
        default=None,
        help="Redis or Valkey that holds the fleet; none: one is started, and stopped with it",
    )
    redis_ca_file: str | None = setting_of(RouterSettings, "redis_ca_file")
    redis_cert_file: str | None = setting_of(RouterSettings, "redis_cert_file")
    redis_key_file: str | None = setting_of(RouterSettings, "redis_key_file")
    cluster: str = setting_of(RouterSettings, "cluster")
    cluster_secret: str | None = setting_of(
        RouterSettings,
        "cluster_secret",
        default=None,
        help="secret by which the fleet's processes know each other; none: a random one",
    )

    api_key_file: str | None = setting_of(RouterSettings, "api_key_file")
    admin_key_file: str | None = setting_of(RouterSettings, "admin_key_file")
    shared_prefixes_file: str | None = setting_of(RouterSettings, "shared_prefixes_file")

    allowed_hosts: tuple[str, ...] = setting_of(RouterSettings, "allowed_hosts")
    cors_origins: tuple[str, ...] = setting_of(RouterSettings, "cors_origins")
    tls_cert_file: str | None = setting_of(RouterSettings, "tls_cert_file")
    tls_key_file: str | None = setting_of(RouterSettings, "tls_key_file")

    device: str = setting_of(
        WorkerSettings, "device", help="device of the workers: auto, cpu, cuda or cuda:N"
    )
    dtype: str = setting_of(WorkerSettings, "dtype")
    weights: str = setting_of(WorkerSettings, "weights")
    activations: str = setting_of(WorkerSettings, "activations")
    kv_dtype: str = setting_of(WorkerSettings, "kv_dtype")
    kv_order: str = setting_of(WorkerSettings, "kv_order")
    kv_windows: str = setting_of(WorkerSettings, "kv_windows")
    transport: str = setting_of(WorkerSettings, "transport")
    torch_threads: int | None = setting_of(
        WorkerSettings,
        "torch_threads",
        help="CPU threads of each worker; none: the cores, or as many as a container's CPU quota "
        "allows, divided evenly",
    )
    pin: bool = setting(
        True,
        help="pin each of several workers on a CPU to its own cores, if there are enough and the "
        "system allows it",
    )
    block_size: int = setting_of(WorkerSettings, "block_size")
    num_blocks: int | None = setting_of(
        WorkerSettings, "num_blocks", help="KV blocks of each worker; none: from memory_fraction"
    )
    memory_fraction: float | None = setting_of(
        WorkerSettings,
        "memory_fraction",
        help="part of the available memory that each worker's KV pool may take, at most what a "
        "full batch at full context needs; none: on cpu 0.3, less for many workers; on cuda 0.85",
    )
    max_context: int | None = setting_of(WorkerSettings, "max_context")
    max_batch_size: int | None = setting_of(
        WorkerSettings,
        "max_batch_size",
        help="sequences that run at once on a worker; none: 64 on cpu, 256 on cuda",
    )
    chunk_min_tokens: int = setting_of(WorkerSettings, "chunk_min_tokens")
    chunk_max_tokens: int | None = setting_of(WorkerSettings, "chunk_max_tokens")
    prompt_chunk_tokens: int | None = setting_of(WorkerSettings, "prompt_chunk_tokens")
    itl_target_ms: float = setting_of(WorkerSettings, "itl_target_ms")
    kv_fetch: str = setting_of(RouterSettings, "kv_fetch")
    local_prefill_threshold_tokens: int | None = setting_of(
        RouterSettings, "local_prefill_threshold_tokens"
    )
    kv_checksum: bool = setting_of(WorkerSettings, "kv_checksum")

    restart: bool = setting(True, help="restart a process that ends unexpectedly")
    startup_timeout_s: float = setting(
        600.0, help="how long the fleet may take until it serves", unit="s", minimum=1
    )
    stop_grace_s: float = setting(
        20.0,
        help="how long the router, and then the workers, may each take to stop",
        unit="s",
        minimum=0.1,
    )
    log_dir: str | None = setting(
        None, help="folder for the processes' logs; none: a temporary one"
    )
    log_to: str = setting(
        "files",
        help="files: each process's log goes to a file in log_dir; stdout: all logs, including "
        "those of UCX and Valkey, go to standard output, as one JSON object per line",
        choices=("files", TO_STDOUT),
    )
    log_level: str = setting_of(WorkerSettings, "log_level")
