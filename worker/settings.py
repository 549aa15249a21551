"""Settings that both worker roles share; each role's own settings derive from these.

Holds only values that the operator sets. Derived values (block counts, thread counts) live in the
code that derives them.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from kv_transfer.transports.registry import AUTO, TRANSPORTS
from process.cores import CORES_PATTERN
from process.settings import setting
from protocol.errors import ConfigError
from protocol.hashing import DEFAULT_SEED

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Settings of a prefill or decode worker."""

    model: str = setting(help="folder of a Hugging Face checkpoint, or a hub id")
    served_model_name: str | None = setting(
        None, help="name under which the model is served; none: the folder's name or the hub id"
    )
    dtype: str = setting(
        "auto",
        help="type of weights and KV cache; auto: the checkpoint's",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    weights: str = setting(
        "auto",
        help="exact16: as dtype says; exact12: the same bfloat16 numbers in 12 bits, on a CPU; "
        "auto: exact12 where it can be had, else exact16; int8, int4: rounded to integers at load "
        "(bfloat16 on a CPU); fp8: e4m3, and so the inputs of products (bfloat16 on a card)",
        choices=("auto", "exact16", "exact12", "int8", "int4", "fp8"),
    )
    kv_dtype: str = setting(
        "auto",
        help="what KV blocks hold; auto: as dtype says; fp8: e4m3, half of bfloat16 (our kernels "
        "on a CPU, FlashInfer on a card); one value for all workers that hand over to each other",
        choices=("auto", "fp8"),
    )
    kv_order: str = setting(
        "auto",
        help="how KV blocks hold it; auto: as our kernels read it fastest; tokens: token by token, "
        "for workers on CPUs with and without bf16 products that hand over to each other; pairs: "
        "for bf16 products, no bits apart, where that can be, else tokens",
        choices=("auto", "tokens", "pairs"),
    )
    device: str = setting(
        "auto",
        help="device to run on: auto, cpu, cuda or cuda:N; auto: cuda where there is one",
        pattern=r"auto|cpu|cuda(:\d+)?",
    )
    torch_threads: int | None = setting(
        None,
        help="CPU threads of torch; none: one for each of `cores`, if any, else torch's own choice",
        unit="threads",
        minimum=1,
    )
    cores: tuple[str, ...] = setting(
        (), help="CPU cores to keep to, as 0-3,8; none named: any", pattern=CORES_PATTERN
    )
    attention: str = setting(
        "auto",
        help="kernel: our own C++ kernels on a CPU, FlashInfer on a card, built at first use; "
        "torch; auto: kernel where it can be",
        choices=("auto", "torch", "kernel"),
    )
    cuda_graphs: bool = setting(
        True, help="capture decode steps as CUDA graphs at start, where FlashInfer runs them"
    )

    block_size: int = setting(16, help="tokens in a KV block", unit="tokens", minimum=1)
    num_blocks: int | None = setting(
        None,
        help="KV blocks in the pool; none: from memory_fraction",
        unit="blocks",
        minimum=1,
    )
    memory_fraction: float | None = setting(
        None,
        help="on cpu, part of the available memory that the KV pool may take; on cuda, part of the "
        "card that this process may hold in all (two workers on one card: 0.45 each); the pool "
        "takes no more than a full batch at full context needs; none: 0.3 on cpu, 0.85 on cuda",
        minimum=0.01,
        maximum=0.95,
    )
    sm_fraction: float | None = setting(
        None,
        help="part of the card's multiprocessors that this process may use, by CUDA's MPS, whose "
        "daemon must run; none: all of them",
        minimum=0.01,
        maximum=1.0,
    )
    max_context: int | None = setting(
        None,
        help="longest prompt and output together; none: the model's own limit",
        unit="tokens",
        minimum=2,
    )
    hash_seed: str = setting(
        DEFAULT_SEED, help="seed of the block hashes; one value for the whole fleet"
    )

    max_batch_size: int = setting(
        64, help="sequences that run at once", unit="sequences", minimum=1
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
    request_deadline_s: float = setting(
        600.0,
        help="longest that any request may take, whatever its router allows",
        unit="s",
        minimum=0.1,
    )

    transport: str = setting(
        "auto",
        help="how KV blocks move; auto: nixl where it can be imported, else shm (one host)",
        choices=(AUTO, *TRANSPORTS),
    )
    grant_ttl_ms: int = setting(
        5000,
        help="how long a right to write KV blocks lives without renewal",
        unit="ms",
        minimum=100,
    )
    grant_margin_ms: int = setting(
        250,
        help="a write is posted only if its grant lives at least this much longer",
        unit="ms",
        minimum=1,
    )
    landing_ms: int = setting(
        1000,
        help="how long a posted write may still land after its writer's process is gone",
        unit="ms",
        minimum=10,
    )
    kv_checksum: bool = setting(False, help="send and compare a digest of every KV block")

    host: str = setting(
        "127.0.0.1", help="address to bind, and that others reach this worker by", pattern=r"\S+"
    )
    control_port: int = setting(
        0, help="port of the control socket; 0: any free one", minimum=0, maximum=65535
    )
    events_port: int = setting(
        0, help="port of the event socket; 0: any free one", minimum=0, maximum=65535
    )
    metrics_port: int | None = setting(
        None, help="port of Prometheus metrics; none: off, 0: any free", minimum=0, maximum=65535
    )
    worker_id: str | None = setting(
        None,
        help="name of this worker in the fleet; none: the role and six random hex digits",
        pattern=NAME_PATTERN,
    )

    redis_url: str = setting(
        help="Redis or Valkey that holds the fleet, as redis://[:password@]host:port[/db]",
        pattern=r"(rediss?|unix)://.+",
        secret=True,
    )
    cluster: str = setting(
        "default", help="name of the fleet within that Redis", pattern=NAME_PATTERN
    )
    cluster_secret: str = setting(
        help="secret by which the fleet's processes know each other, the same in all of them",
        pattern=r"(?s).{16,}",
        secret=True,
        flag=False,
    )
    lease_s: float = setting(
        2.0, help="how long a registration outlives its worker", unit="s", minimum=0.3
    )

    peer_silence_s: float = setting(
        10.0,
        help="silence after which a connected peer counts as lost, and a prefill worker is not "
        "waited for; longer than its longest step",
        unit="s",
        minimum=2.0,
    )
    stats_interval_ms: int = setting(
        100, help="least time between two published load reports", unit="ms", minimum=1
    )
    stats_idle_ms: int = setting(
        1000, help="time after which load is reported though nothing changed", unit="ms", minimum=1
    )
    drain_grace_s: float = setting(
        30.0, help="how long a stopping worker lets its requests finish", unit="s", minimum=0
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

    def __post_init__(self) -> None:
        if self.chunk_min_tokens > self.chunk_max_tokens:
            raise ConfigError(
                f"chunk_min_tokens ({self.chunk_min_tokens}) must not exceed "
                f"chunk_max_tokens ({self.chunk_max_tokens})"
            )


def choose_worker_id(role: str, configured: str | None) -> str:
    """The configured name, or the role and six random hex digits."""
    return configured or f"{role}-{secrets.token_hex(3)}"
