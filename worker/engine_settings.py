"""Settings of a worker's engine: its model and device, its memory for KV, the size of its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from process.cores import CORES_PATTERN
from process.settings import setting
from protocol.errors import ConfigError
from protocol.layout import ALL_TOKENS, MAX_RANKS, WINDOW
from worker.ranks.node_settings import NodeSettings

CHECKPOINT, PEER = "checkpoint", "peer"
_RANKS = "a worker of several ranks (tensor_parallel, pipeline_parallel)"
_ADVISED = ("weights", "kv_dtype", "memory_fraction", "num_blocks", "max_context")


@dataclass(frozen=True, kw_only=True)
class EngineSettings(NodeSettings):
    """The settings that decide what a worker's engine computes, on what, and in which steps."""

    card_chunk_tokens: ClassVar[int] = 2048
    """`chunk_max_tokens` on a large card by default: decodes wait for a chunk beside them."""

    dtype: str = setting(
        "auto",
        help="type of weights and KV cache; auto: the checkpoint's",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    weights: str = setting(
        "auto",
        help="exact16: as dtype says; exact12: the same bfloat16 numbers in 12 bits, on a CPU; "
        "auto: exact12 if possible, otherwise exact16; int8, int4: rounded to integers at "
        "load (bfloat16 on a CPU), with int4 some of them to 5 bits; fp8: weights "
        "and inputs of products in e4m3 (bfloat16 on a card)",
        choices=("auto", "exact16", "exact12", "int8", "int4", "fp8"),
    )
    activations: str = setting(
        "auto",
        help="inputs by which products multiply weights; auto: as dtype says; int8: integers "
        "with a scale for each 32 inputs, for weights of 8 bits or fewer on a CPU with "
        "AVX-512 VNNI (other CPUs compute as with auto); the same for all workers that hand "
        "over to each other",
        choices=("auto", "int8"),
    )
    weights_from: str = setting(
        CHECKPOINT,
        help="where weights come from; peer: from a worker that serves the same model, over the "
        "transport and verified by digest, or from the checkpoint if no worker can send "
        "them; with a hub id, the checkpoint's weights are fetched only in that case",
        choices=(CHECKPOINT, PEER),
    )
    kv_dtype: str = setting(
        "auto",
        help="numbers in KV blocks; auto: as dtype says; fp8: e4m3, half the size of bfloat16 "
        "(our kernels on a CPU, FlashInfer on a card); the same for all workers that hand "
        "over to each other",
        choices=("auto", "fp8"),
    )
    kv_order: str = setting(
        "auto",
        help="order of the numbers in KV blocks; auto: the order that our kernels read fastest; "
        "tokens: token by token, for workers on CPUs with and without bf16 products that "
        "hand over to each other; pairs: for bf16 products, each number in one piece, if "
        "possible, otherwise tokens",
        choices=("auto", "tokens", "pairs"),
    )
    kv_windows: str = setting(
        ALL_TOKENS,
        help="what layers with a window keep in the pool; all: every token, like other layers; "
        "window: only what later tokens still see, on cpu; auto: window on cpu if other "
        "layers of the model keep all tokens, otherwise all; the same for all workers that "
        "hand over to each other",
        choices=("auto", ALL_TOKENS, WINDOW),
    )
    device: str = setting(
        "auto",
        help="device to run on: auto, cpu, cuda or cuda:N; auto: cuda if there is a card; with "
        "several ranks, rank 0 has this card, and each further rank the next card",
        pattern=r"auto|cpu|cuda(:\d+)?",
    )
    tensor_parallel: int = setting(
        1,
        help="ranks that each layer is split over: each has a part of its heads and of its inner "
        "width, and a process of its own, with cores or a card of its own",
        unit="ranks",
        minimum=1,
        maximum=MAX_RANKS,
    )
    pipeline_parallel: int = setting(
        1,
        help="stages that the model's layers are split into, one after the other; each has "
        "tensor_parallel ranks",
        unit="stages",
        minimum=1,
        maximum=MAX_RANKS,
    )
    card_sums: str = setting(
        "auto",
        help="how ranks of a stage add up on cards; symmetric: small sums through memory that "
        "all these cards map, others by nccl; auto: for each size, the one that is faster "
        "when measured at start",
        choices=("auto", "nccl", "symmetric"),
    )
    peer_tensor_parallel: int | None = setting(
        None,
        help="tensor_parallel of the workers that this one exchanges KV with; none: the same as "
        "its own; if it differs, set this on both sides, so that each pair of ranks shares "
        "one piece of a KV block",
        unit="ranks",
        minimum=1,
        maximum=MAX_RANKS,
    )
    peer_pipeline_parallel: int | None = setting(
        None,
        help="pipeline_parallel of those workers; none: the same as its own",
        unit="stages",
        minimum=1,
        maximum=MAX_RANKS,
    )
    torch_threads: int | None = setting(
        None,
        help="CPU threads of torch, divided among the ranks; none: one for each of `cores`, or, "
        "without `cores`, as many as torch chooses and a container's CPU quota allows",
        unit="threads",
        minimum=1,
    )
    cores: tuple[str, ...] = setting(
        (), help="CPU cores to use, such as 0-3,8; none named: any", pattern=CORES_PATTERN
    )
    attention: str = setting(
        "auto",
        help="what computes attention; kernel: our own C++ kernels on a CPU, FlashInfer on a "
        "card, built at first use; torch: torch's operations; auto: kernel if possible, "
        "otherwise torch",
        choices=("auto", "torch", "kernel"),
    )
    kernels_dir: str | None = setting(
        None,
        help="folder in which `baton build-kernels` has built C++ kernels; without it, or if it "
        "lacks kernels for this CPU, they are built at first use, into the user's cache",
    )
    cuda_graphs: bool = setting(
        True, help="capture decode steps as CUDA graphs at start, unless attention is torch's"
    )
    batch_invariant: bool = setting(
        False,
        help="compute each sequence's tokens and KV with the same bits whatever else is in its "
        "steps; on cuda this needs slower kernels (attention auto, not weights fp8), and "
        "the same setting on all workers that hand over to each other; on cpu our own "
        "kernels always do so, and other kernels are refused",
    )
    one_step_ahead: str = setting(
        "auto",
        help="launch each step before the tokens of the previous step are read, so that the "
        "device does not wait for its host; auto: on cuda, and on prefill workers of "
        "several stages, which launch as many steps as they have stages",
        choices=("auto", "on", "off"),
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
        help="on cpu, the part of the available memory that the KV pool may take; on cuda, the "
        "part of the card that this process may hold in all (0.45 each for two workers on "
        "one card); the pool never takes more than a full batch at full context needs; "
        "none: 0.3 on cpu, 0.85 on cuda",
        minimum=0.01,
        maximum=0.95,
    )
    host_tier_bytes: int = setting(
        0,
        help="host memory for KV blocks that the pool evicts, besides the pool itself; pinned if "
        "the device is a card; 0: none",
        unit="bytes",
        minimum=0,
    )
    disk_tier_bytes: int = setting(
        0,
        help="most that this worker may take of disk_tier_dir, for KV blocks that leave host "
        "memory; 0: none",
        unit="bytes",
        minimum=0,
    )
    disk_tier_dir: str | None = setting(
        None,
        help="folder of a local disk for KV blocks, encrypted by a key from the cluster's secret; "
        "each worker has a folder of its own in it, and finds its blocks again after a restart",
    )
    tier_max_age_s: float = setting(
        3600.0,
        help="time after which unused KV blocks in host memory and on disk are erased",
        unit="s",
        minimum=1.0,
    )
    sm_fraction: float | None = setting(
        None,
        help="part of the card's multiprocessors that this process may use, through CUDA's MPS, "
        "whose daemon must run; none: all of them",
        minimum=0.01,
        maximum=1.0,
    )
    max_context: int | None = setting(
        None,
        help="longest prompt and output together; none: the model's own limit",
        unit="tokens",
        minimum=2,
    )

    max_batch_size: int | None = setting(
        None,
        help="sequences that run at once; none: 64 on cpu, 256 on cuda",
        unit="sequences",
        minimum=1,
    )
    chunk_min_tokens: int = setting(
        16,
        help="fewest prompt tokens that a step computes while others decode",
        unit="tokens",
        minimum=1,
    )
    chunk_max_tokens: int | None = setting(
        None,
        help="most prompt tokens that a step computes; none: 512 on cpu; on cuda 8192 for prefill "
        "workers (less on cards below 32 GiB) and 2048 for decode workers",
        unit="tokens",
        minimum=1,
    )
    prompt_chunk_tokens: int | None = setting(
        None,
        help="most tokens of one prompt that a step computes, so that shorter prompts have room "
        "beside it; none: chunk_max_tokens",
        unit="tokens",
        minimum=1,
    )
    itl_target_ms: float = setting(
        50.0,
        help="inter-token latency of running decodes that prompt chunks in the same step must "
        "keep to",
        unit="ms",
        minimum=0.1,
    )
    mask_wait_ms: float = setting(
        50.0,
        help="how long a step waits for the masks of grammars; a request whose masks take longer "
        "is left out of steps until they are ready",
        unit="ms",
        minimum=1.0,
    )
    mask_limit_s: float = setting(
        10.0,
        help="how long this worker may compute masks for one request, all its choices together; "
        "the first millisecond of each token does not count; a request that takes longer fails",
        unit="s",
        minimum=0.1,
    )

    @property
    def num_ranks(self) -> int:
        """The processes that the model is split over."""
        return self.tensor_parallel * self.pipeline_parallel

    def advised(self) -> dict[str, str]:
        """The values that the doctor may advise to change, as far as they are set."""
        values = {name: getattr(self, name) for name in _ADVISED}
        return {name: str(value) for name, value in values.items() if value is not None}

    def __post_init__(self) -> None:
        if bool(self.disk_tier_bytes) != bool(self.disk_tier_dir):
            raise ConfigError("disk_tier_bytes and disk_tier_dir need each other")
        if self.disk_tier_bytes and not self.host_tier_bytes:
            raise ConfigError(
                "disk_tier_bytes needs host_tier_bytes: blocks reach the disk through host memory"
            )
        if self.num_ranks > 1:
            self._check_ranks()
        if self.chunk_max_tokens is not None and self.chunk_min_tokens > self.chunk_max_tokens:
            raise ConfigError(
                f"chunk_min_tokens ({self.chunk_min_tokens}) must not exceed "
                f"chunk_max_tokens ({self.chunk_max_tokens})"
            )

    def _check_ranks(self) -> None:
        """Raises ConfigError for settings that several ranks do not have."""
        if self.weights_from == PEER:
            raise ConfigError(f"weights_from peer: {_RANKS} loads its checkpoint; leave it out")
        if self.batch_invariant and self.tensor_parallel > 1:
            raise ConfigError(
                "batch_invariant: sums over several ranks (tensor_parallel) have other bits than "
                "those of one rank"
            )
