"""Settings that the simulator's commands share: traffic, model, devices, limits, targets."""

from __future__ import annotations

from dataclasses import dataclass

from process.settings import setting, setting_of
from protocol.layout import ALL_TOKENS, WINDOW


@dataclass(frozen=True, kw_only=True)
class SimulationSettings:
    """What is simulated, besides the fleet's size."""

    trace: str = setting(
        help="a file (Mooncake's or Bailian's JSON lines, Azure's or BurstGPT's CSV, sessions of "
        "agents, or what a router recorded with record_trace), or made-up traffic: "
        "poisson:rate=4,prompt=1024,output=256,requests=1000, bursts:burst=16,... or "
        "turns:turns=5,pause=10,..."
    )
    model: str = setting(
        help="a config.json or its folder, a GGUF file, or Llama-3-8B, Llama-3-70B, OPT-13B, "
        "Qwen3-30B-A3B"
    )
    gpu: str = setting(
        "H100", help="H100, H200, A100-80G, A800, L40S, or a JSON file with measured numbers"
    )
    tp: int | None = setting(
        None,
        help="GPUs of each worker; none: the smallest number with which the weights fill at most "
        "half of the memory",
        unit="GPUs",
        minimum=1,
        maximum=64,
        also="--tensor-parallel",
    )
    weight_bits: float = setting(16, help="bits of a weight", minimum=1, maximum=32)
    kv_bits: float = setting(16, help="bits of a value in the KV cache", minimum=1, maximum=32)
    kv_windows: str = setting(
        "auto",
        help="what layers with a window keep in the pool, like the workers' setting; all: every "
        "token; window: only what later tokens see; auto: window if other layers keep all "
        "tokens",
        choices=("auto", ALL_TOKENS, WINDOW),
    )
    ttft_ms: int = setting(
        2000,
        help="target: time to the first token of a good request",
        unit="ms",
        minimum=1,
        also="--ttft-target-ms",
    )
    tpot_ms: int = setting(
        50,
        help="target: time of each later token of a good request",
        unit="ms",
        minimum=1,
        also="--tpot-target-ms",
    )
    name_targets: bool = setting(
        True,
        help="requests carry the targets, as clients' headers and keys do, and placement uses them",
    )
    refuse_late: bool = setting(
        False, help="routers refuse requests that are predicted to miss the targets that they carry"
    )
    seed: int = setting(
        0, help="seed of everything random; equal seeds give equal results", minimum=0
    )
    speed: float = setting(
        1.0, help="how many times faster than recorded the requests come", minimum=1e-6
    )
    limit: int | None = setting(
        None, help="use only this many requests (or sessions) of the trace", minimum=1
    )
    span_s: float = setting(
        1800.0, help="sessions of agents begin within this time", unit="s", minimum=0
    )
    block_size: int = setting(64, help="tokens in a KV block", unit="tokens", minimum=1)
    max_batch_size: int = setting(
        256, help="sequences that run at once on a worker", unit="sequences", minimum=1
    )
    prefill_chunk_tokens: int = setting(
        8192, help="most prompt tokens in a step of a prefill worker", unit="tokens", minimum=1
    )
    decode_chunk_tokens: int = setting(
        2048, help="most prompt tokens in a step of a decode worker", unit="tokens", minimum=1
    )
    itl_target_ms: float = setting(
        50.0,
        help="inter-token latency of running decodes that prompt chunks in the same step must "
        "keep to",
        unit="ms",
        minimum=0.1,
    )
    num_blocks: int | None = setting(
        None,
        help="KV blocks of a worker; none: what fits beside the weights",
        unit="blocks",
        minimum=1,
    )
    max_context: int | None = setting(
        None,
        help="longest prompt and output together; none: the model's limit",
        unit="tokens",
        minimum=2,
    )
    link_gbps: float | None = setting(
        None,
        help="network of each worker in one direction; none: the usual one of its GPUs",
        unit="Gbit/s",
        minimum=1e-3,
    )
    link_latency_us: float = setting(20.0, help="latency of a transfer of KV", unit="us", minimum=0)
    message_ms: float = setting(
        0.2,
        help="time of a message between router and worker",
        unit="ms",
        minimum=0,
        maximum=500,
    )
    report_ms: float = setting(
        100.0, help="least time between two reports of a worker's load", unit="ms", minimum=0
    )
    routers: int = setting(1, help="routers among which requests are spread", minimum=1)
    tell_ms: float = setting(
        20.0,
        help="mean time between two messages in which a router tells the others what it has sent; "
        "0: it tells nothing",
        unit="ms",
        minimum=0,
    )


@dataclass(frozen=True, kw_only=True)
class SimulateSettings(SimulationSettings):
    """Settings of `baton simulate`."""

    prefill: int = setting(0, help="prefill workers", unit="workers", minimum=0, maximum=8192)
    decode: int = setting(0, help="decode workers", unit="workers", minimum=0, maximum=8192)
    colocated: int = setting(
        0,
        help="workers that both compute prompts and decode; they are a separate fleet beside the "
        "prefill and decode workers",
        unit="workers",
        minimum=0,
        maximum=8192,
    )
    policies: tuple[str, ...] = setting(
        ("baton",),
        help="how requests are placed: baton, random, round-robin, least-loaded, power-of-two, "
        "prefix-affinity, lmetric, llm-d, aibrix, sglang, dynamo, threshold-2048, always-split, "
        "never-split, or all of these; no-prediction, no-pending, no-local, no-sessions: Baton's "
        "without that part, or ablation; several are compared",
    )
    jobs: int | None = setting(
        1, help="simulations at once; none: one for each core", unit="processes", minimum=1
    )
    usd_per_gpu_hour: float | None = setting(
        None, help="price of a GPU, for the cost", unit="USD", minimum=0
    )
    json: bool = setting(False, help="print JSON instead of a table")
    html: str | None = setting(None, help="also write the report to this file, with charts")


@dataclass(frozen=True, kw_only=True)
class PlanSettings(SimulationSettings):
    """Settings of `baton plan`."""

    gpus: int = setting(help="how many GPUs the fleet has", unit="GPUs", minimum=1, maximum=8192)
    limit: int | None = setting_of(SimulationSettings, "limit", default=2000)
    good_share: float = setting(
        0.9, help="the share of requests that must meet both targets", minimum=0.01, maximum=1
    )
    chunks: tuple[str, ...] = setting(
        ("512", "2048", "8192"),
        help="most prompt tokens in a step of workers that compute prompts: the values to try",
        pattern=r"[1-9]\d{0,6}",
    )
    rounds: int = setting(
        5, help="how often the interval of the best load is halved", minimum=0, maximum=20
    )
    jobs: int | None = setting(
        None, help="simulations at once; none: one for each core", unit="processes", minimum=1
    )
    resume: str | None = setting(
        None,
        help="file that keeps finished simulations; a search continues from those that are in it",
    )
    json: bool = setting_of(SimulateSettings, "json")


@dataclass(frozen=True, kw_only=True)
class TuneSettings(SimulationSettings):
    """Settings of `baton tune`."""

    prefill: int = setting_of(SimulateSettings, "prefill")
    decode: int = setting(help="decode workers", unit="workers", minimum=1, maximum=8192)
    rounds: int = setting(
        5, help="how often the search goes on from the best settings", minimum=1, maximum=50
    )
    parts: int = setting(
        20,
        help="parts of the trace; every other part chooses the settings, and the remaining parts "
        "measure their gain",
        minimum=10,
        maximum=1000,
    )
    jobs: int | None = setting_of(PlanSettings, "jobs")
    resume: str | None = setting_of(PlanSettings, "resume")
    json: bool = setting_of(SimulateSettings, "json")
