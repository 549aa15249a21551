"""The card: its machine and limits, single steps on it, and the memory that an engine takes.

The other checks of bench.gpu share what is here. A check takes a `Card`, which has the limits
measured in the same run. Shapes and sizes are parameters, so that every check also runs small on a
CPU, where it tests only the code.

The driver reports the memory in use on the whole card. The first reading is taken through NVML,
which needs no CUDA context, before this process has one, so that the context counts as taken.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch.utils.cpp_extension import CUDA_HOME

from bench.engine.limits import step_needs
from engine.attention.base import AttentionBackend, Segment
from engine.backend import Backend
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.model_weights import empty_weights
from engine.device import wait_for
from engine.engine_config import EngineConfig
from engine.gpu.graphs import DecodeGraphs
from engine.gpu.memory import Taken
from engine.gpu.toolchain import HEADERS, HOME, LIBRARIES, compile_sample, prepare_builds
from engine.kv_pool import KvPool
from engine.loader import load_engine
from engine.models.decoder import DecoderModel
from scheduling.scheduler import SchedulerConfig

BLOCK_SIZE = 16
_PACKAGES = ("flashinfer-python", "apache-tvm-ffi", "triton", "transformers", "nixl-cu13")
_QUERY_S = 20.0


@dataclass(frozen=True)
class Row:
    """One figure: the part, what was measured, its value, and its goal if it has one."""

    part: str
    name: str
    value: float
    unit: str
    goal: str = ""
    note: str = ""


@dataclass(frozen=True)
class Card:
    """A device and its limits in this run."""

    device: torch.device
    copy_bytes_per_s: float  # read and written
    flops_per_s: float  # of a large bf16 product

    @classmethod
    def unmeasured(cls, device: torch.device) -> Card:
        """A card with made-up limits, for checks that do not compare with them."""
        return cls(device, 1.0, 1.0)


@dataclass(frozen=True)
class Passes:
    """A model with a pool full of random KV, and its attention."""

    model: DecoderModel
    pool: KvPool
    attention: AttentionBackend
    decode: Callable[[list[int], list[int], list[Segment]], torch.Tensor]
    graphs: DecodeGraphs | None = None  # what `decode` replays


def measure_card(device: torch.device, num_bytes: int = 4 << 30, width: int = 8192) -> Card:
    """The rate of a copy on the device and of a square bf16 product of random numbers."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = seconds(lambda: target.copy_(source), device)
    a, b = (torch.randn((width, width), device=device).bfloat16() for _ in range(2))
    product_s = seconds(lambda: torch.mm(a, b), device)
    return Card(device, 2 * num_bytes / copy_s, 2 * width**3 / product_s)


def attention_of(device: str) -> str:
    """The attention setting for a card's figures: with `auto`, a card without FlashInfer would be
    measured with torch's attention."""
    return "kernel" if device.startswith("cuda") else "auto"


def check_decode(card: Card, passes: Passes, batch: int, context: int) -> Row:
    """Bytes of weights and KV that decode reads per second, as a share of the copy bandwidth."""
    step_s = decode_s(card, passes, batch, context)
    needs = step_needs(passes.model.config)
    share = needs.decode_bytes(batch, context) / step_s / card.copy_bytes_per_s
    goal = ">= 85" if (batch, context) in ((1, 1024), (1, 8192), (128, 8192)) else ""
    note = f"{1e3 * step_s:.2f} ms a step, {batch / step_s:.0f} tokens/s"
    return Row("decode", f"batch {batch} at {context}", 100 * share, "% of copy", goal, note)


def check_graphs(card: Card, passes: Passes, batch: int, context: int) -> Row:
    """Time of a decode step launched kernel by kernel over that of its graph."""
    segments, positions = decodes_of(passes, batch, context)
    tokens = torch.ones(batch, dtype=torch.int64, device=card.device)
    at = torch.tensor(positions, device=card.device)

    def eager() -> None:
        passes.attention.plan(segments)
        passes.model.forward(tokens, at, passes.attention)

    graph_s = seconds(lambda: passes.decode([1] * batch, positions, segments), card.device)
    eager_s = seconds(eager, card.device)
    note = f"{1e3 * eager_s:.2f} against {1e3 * graph_s:.2f} ms a step"
    return Row(
        "decode",
        f"batch {batch} at {context}: eager over graphs",
        eager_s / graph_s,
        "x",
        note=note,
    )


def check_prefill(card: Card, passes: Passes, chunk: int) -> Row:
    """Arithmetic rate of one chunk, as a share of a large product's rate."""
    step_s = chunk_s(card, passes, chunk)
    share = step_needs(passes.model.config).prefill_flops(chunk) / step_s / card.flops_per_s
    goal = ">= 70" if chunk >= 2048 else ""
    note = f"{chunk / step_s:.0f} tokens/s"
    return Row("prefill", f"chunk of {chunk}", 100 * share, "% of product", goal, note)


def check_overhead(card: Card, passes: Passes, batch: int = 32, context: int = 1024) -> Row:
    """Host time of planning and launching a decode step, relative to the step: the time that
    running one step ahead hides (part `ahead`). Scheduling and sampling are not included."""
    segments, positions = decodes_of(passes, batch, context)
    decode = passes.decode
    step_s = seconds(lambda: decode([1] * batch, positions, segments), card.device)
    spans = []
    for _ in range(10):
        wait_for(card.device)
        started = time.perf_counter()
        decode([1] * batch, positions, segments)
        spans.append(time.perf_counter() - started)
    share = 100 * sorted(spans)[len(spans) // 2] / step_s
    return Row("overhead", f"batch {batch} at {context}", share, "% of step", "< 5")


def random_model(config: ModelConfig, backend: Backend) -> DecoderModel:
    """A model of this shape with random bf16 weights, made on the backend's device."""
    weights = empty_weights(config, backend.device, torch.bfloat16)
    halves = [half for each in weights.layers for half in (each.attention, each.feed_forward)]
    norms = [
        norm
        for each in weights.layers
        for norm in (each.input_norm, each.post_norm)
        if norm is not None
    ]
    matrices = [matrix for half in halves for matrix in half.matrices.values()]
    vectors = [vector for half in halves for vector in half.vectors.values()]
    for matrix in (weights.embed, weights.lm_head, *matrices):
        assert isinstance(matrix, torch.Tensor)
        matrix.normal_(std=0.02)
    for vector in (weights.final_norm, *norms, *vectors):
        vector.fill_(1.0)
    return DecoderModel(config, weights, backend)


def seconds(work: Callable[[], object], device: torch.device, times: int = 10) -> float:
    """Mean seconds of `times` runs one after the other, after two warm-up runs."""
    for _ in range(2):
        work()
    _wait_for_all(device)
    started = time.perf_counter()
    for _ in range(times):
        work()
    _wait_for_all(device)
    return (time.perf_counter() - started) / times


def _wait_for_all(device: torch.device) -> None:
    """Wait until a card has finished the work of all streams."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def decode_s(card: Card, passes: Passes, batch: int, context: int) -> float:
    """Seconds of a decode step."""
    segments, positions = decodes_of(passes, batch, context)
    return seconds(lambda: passes.decode([1] * batch, positions, segments), card.device)


def chunk_s(card: Card, passes: Passes, chunk: int) -> float:
    """Seconds of a step of one chunk without a context."""
    segment = Segment(chunk, chunk, range(-(-chunk // BLOCK_SIZE)))
    tokens = torch.ones(chunk, dtype=torch.int64, device=card.device)
    positions = torch.arange(chunk, device=card.device)
    last = torch.tensor([chunk - 1], device=card.device)

    def step() -> None:
        passes.attention.plan([segment])
        passes.model.forward(tokens, positions, passes.attention, last)

    return seconds(step, card.device)


def decodes_of(passes: Passes, batch: int, context: int) -> tuple[list[Segment], list[int]]:
    """`batch` sequences of `context` tokens, of which the last token is to be computed.

    If the pool is too small, block numbers wrap around to its first blocks. The figures stay valid
    because the pool is many times larger than any cache of the card.
    """
    each = -(-context // BLOCK_SIZE)
    blocks = [i % passes.pool.num_blocks for i in range(batch * each)]
    tables = [blocks[i * each : (i + 1) * each] for i in range(batch)]
    return [Segment(1, context, table) for table in tables], [context - 1] * batch


def describe_machine(device: torch.device) -> Iterator[Row]:
    """The installed software, and the names of missing packages, without which some parts fail."""
    properties = torch.cuda.get_device_properties(device)
    capability = f"{properties.major}.{properties.minor}"
    note = (
        f"{properties.name}, compute capability {capability}, "
        f"{properties.multi_processor_count} multiprocessors, driver {_driver()}"
    )
    yield Row("limits", "card", properties.total_memory / 2**30, "GiB", note=note)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {"CUDA": str(torch.version.cuda)} | {name: _version(name) for name in _PACKAGES}
    missing = [name for name, found in versions.items() if found == "missing"]
    note = ", ".join(f"{name} {found}" for name, found in versions.items())
    yield Row("limits", "packages that are missing", len(missing), "", "= 0", note)
    tools = {name: _tool(name) for name in ("nvcc", "ninja")}
    note = ", ".join(f"{name} {found}" for name, found in tools.items())
    absent = sum(found == "missing" for found in tools.values())
    yield Row("limits", "tools that are missing", absent, "", "= 0", note)
    yield check_builds(os.environ | {})


def check_builds(environment: dict[str, str]) -> Row:
    """Whether FlashInfer's kernels can be built: compiles and links a small file with the compiler,
    headers and libraries that a build will use."""
    major = int(torch.version.cuda.split(".")[0]) if torch.version.cuda else None
    started = time.monotonic()
    reason = prepare_builds(environment, major) or compile_sample(environment)
    found = ", ".join(f"{name} {environment.get(name, '-')}" for name in (HOME, HEADERS, LIBRARIES))
    note = f"{reason}; {found}" if reason else f"{time.monotonic() - started:.1f} s; {found}"
    name = "builds that fail, of a small kernel"
    return Row("limits", name, int(bool(reason)), "", "= 0", note)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _tool(name: str) -> str:
    """A tool's location, as FlashInfer finds it: on the path, or with CUDA."""
    folders = [f"{CUDA_HOME}/bin"] if CUDA_HOME else []
    return shutil.which(name) or shutil.which(name, path=":".join(folders)) or "missing"


def _driver() -> str:
    """The driver's version, from nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"
    return said.stdout.split("\n")[0].strip()


@dataclass(frozen=True)
class CardUse:
    """Bytes of a card: in total, in use before the engine, and in use with the engine."""

    total: int
    before: int
    after: int

    def of_fraction(self, fraction: float) -> float:
        """The engine's use divided by its allowance."""
        return (self.after - self.before) / (fraction * self.total)


def check_memory(card: Card, folder: Path, fraction: float) -> Iterator[Row]:
    """Measure an engine with graphs and a profiled pool, after its largest prompt and decodes."""
    before = _used(card.device)
    config = EngineConfig(
        folder=folder,
        scheduler=SchedulerConfig(BLOCK_SIZE, max_batch_size=64, chunk_max_tokens=2048),
        dtype="bfloat16",
        device=str(card.device),
        memory_fraction=fraction,
        attention=attention_of(str(card.device)),
    )
    started = time.monotonic()
    loaded = load_engine(config, time.monotonic)
    ready_s = time.monotonic() - started
    loaded.engine.warm_up()
    wait_for(card.device)
    total = torch.cuda.get_device_properties(card.device).total_memory
    yield from memory_rows(CardUse(total, before, _used(card.device)), fraction)
    taken, pool = Taken.now(card.device), loaded.pool
    pool_bytes = pool.num_blocks * pool.block_bytes
    note = f"{pool.num_blocks} blocks of {pool.block_bytes / 1e6:.2f} MB"
    yield Row("memory", "KV pool", pool_bytes / 2**30, "GiB", note=note)
    yield Row("memory", "by torch's count, with the pool", taken.on_card / 2**30, "GiB")
    yield Row("memory", "pinned on the host", taken.pinned / 2**20, "MiB")
    yield Row("memory", "from checkpoint to ready", ready_s, "s", note="profile and graphs")


def memory_rows(use: CardUse, fraction: float) -> Iterator[Row]:
    """The memory taken, and whether it is within the fraction."""
    note = f"{(use.after - use.before) / 2**30:.2f} GiB of {use.total / 2**30:.1f} GiB"
    share = 100 * use.of_fraction(fraction)
    name = f"taken, of a fraction of {fraction:g}"
    yield Row("memory", name, share, "% of allowed", "<= 100", note)


def _used(device: torch.device) -> int:
    """Bytes of the card in use by any process, from the driver."""
    import pynvml  # comes with FlashInfer

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(device.index or 0)
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    finally:
        pynvml.nvmlShutdown()
