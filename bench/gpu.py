"""Builds, checks and measures the engine on a CUDA card; `python -m bench.gpu [--part NAME]`.

Needs no network. The cheapest and most informative parts come first; each row is printed and
appended to a file of JSON lines as soon as it is there, so that a run that is cut short keeps what
it has. A part that fails, or takes longer than its limit, is a row that says so, and the next part
runs.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.checkpoints import add_tokenizer, benchmark_checkpoint
from bench.gpu_ahead import Decodes, check_ahead
from bench.gpu_checks import (
    BLOCK_SIZE,
    Card,
    Passes,
    Row,
    check_decode,
    check_exactness,
    check_graphs,
    check_overhead,
    check_prefill,
    measure_card,
    random_model,
)
from bench.gpu_models import Load, check_logits, check_throughput
from bench.gpu_split import SplitLoad, check_split
from engine.config import ModelConfig, parse_model_config
from engine.gpu.backend import CardBackend
from engine.gpu.graphs import CudaCapture, DecodeGraphs
from engine.json_keys import JsonKeys
from engine.kv_pool import KvPool

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128_256,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "dtype": "bfloat16",
    "eos_token_id": 2,
}
DECODE_BATCHES = (1, 8, 32, 128, 256)
CONTEXTS = (1024, 8192)
CHUNKS = (512, 2048, 8192)
_POOL_BYTES = 96 << 30  # of the 128 GiB of 128 sequences of 8,192 tokens


PART_LIMIT_S = 480.0


class PartOverran(Exception):
    """A part took longer than its limit; the rows that it gave are kept."""


def main(arguments: list[str] | None = None) -> int:
    """Run the parts that were asked for; 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all, in order")
    parser.add_argument("--output", type=Path, default=Path("gpu.jsonl"))
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("bench.gpu needs a CUDA card, and torch sees none", file=sys.stderr)
        return 1
    rows = []
    with options.output.open("a") as file:
        for row in run_parts(options.part or list(PARTS), torch.device("cuda:0"), PARTS):
            print(json.dumps(asdict(row)), file=file, flush=True)
            Console().print(f"{row.part}: {row.name}: {row.value:.4g} {row.unit} {row.note}")
            rows.append(row)
    Console().print(table(rows))
    return int(any(row.unit == "failed" for row in rows))


def run_parts(
    names: list[str],
    device: torch.device,
    parts: dict[str, Part],
    limit_s: float = PART_LIMIT_S,
) -> Iterator[Row]:
    """The rows of these parts as they come; a part that raises, or takes longer than `limit_s`,
    ends with a row that says so. For the main thread."""
    for name in names:
        started = time.monotonic()
        try:
            with _limit(limit_s):
                yield from parts[name](device)
        except Exception as error:  # noqa: BLE001 - one part's failure does not lose the others
            yield Row(name, type(error).__name__, 0.0, "failed", note=str(error)[:300])
        yield Row(name, "took", time.monotonic() - started, "s")


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raises PartOverran in the block, as soon as Python runs, once it has taken so long."""

    def overrun(number: int, frame: object) -> None:
        raise PartOverran(f"ended after {seconds:g} s with what it had")

    former = signal.signal(signal.SIGALRM, overrun)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, former)


def table(rows: list[Row]) -> Table:
    """The rows side by side."""
    made = Table("part", "what", "value", "unit", "goal", "note")
    for row in rows:
        made.add_row(row.part, row.name, f"{row.value:.4g}", row.unit, row.goal, row.note)
    return made


def limits(device: torch.device) -> Iterator[Row]:
    """The card's name and its own limits."""
    card = measure_card(device)
    versions = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    yield Row("limits", "copy", card.copy_bytes_per_s / 1e12, "TB/s", note=versions)
    yield Row("limits", "bf16 product", card.flops_per_s / 1e12, "TFLOP/s")


def build(device: torch.device) -> Iterator[Row]:
    """FlashInfer's and our kernels, built by the first step of a small model of that shape."""
    config = _llama(num_layers=1)
    started = time.monotonic()
    card = Card(device, 1.0, 1.0)
    passes = _passes(config, device, num_blocks=64, sizes=[1])
    check_prefill(card, passes, 64)
    yield Row("build", "kernels, and a first step", time.monotonic() - started, "s")


def exactness(device: torch.device) -> Iterator[Row]:
    """Tokens of small checkpoints."""
    yield from check_exactness(Card(device, 1.0, 1.0))


def logits(device: torch.device) -> Iterator[Row]:
    """Logits of small checkpoints."""
    for name in ("M1", "M2"):
        yield from check_logits(Card(device, 1.0, 1.0), benchmark_checkpoint(name), name)


def peer(device: torch.device) -> Iterator[Row]:
    """Throughput beside transformers'."""
    card = Card(device, 1.0, 1.0)
    yield from check_throughput(card, benchmark_checkpoint("M2"), "M2", Load())


def split(device: torch.device) -> Iterator[Row]:
    """Prefill and decode as two processes on this card."""
    folder = benchmark_checkpoint("M2")
    add_tokenizer(folder)
    yield from check_split(str(device), folder, SplitLoad())


def decode(device: torch.device) -> Iterator[Row]:
    """Decode of the 8B shape, and its host's overhead."""
    card = measure_card(device)
    config = _llama()
    num_blocks = _POOL_BYTES // config.kv_layout("bench", BLOCK_SIZE, "bfloat16").block_bytes
    torch.cuda.empty_cache()
    passes = _passes(config, device, num_blocks, list(DECODE_BATCHES))
    for context in CONTEXTS:
        for batch in DECODE_BATCHES:
            yield check_decode(card, passes, batch, context)
    yield check_overhead(card, passes)
    for batch in (1, 32):
        yield check_graphs(card, passes, batch, CONTEXTS[0])


def ahead(device: torch.device) -> Iterator[Row]:
    """Decode steps of the 8B shape by the engine, one by one and one ahead; leaves traces here."""
    load = Decodes()
    num_blocks = 2 * load.batch * load.context // BLOCK_SIZE
    passes = _passes(_llama(), device, num_blocks, [load.batch])
    yield from check_ahead(Card(device, 1.0, 1.0), passes, load, Path())


def prefill(device: torch.device) -> Iterator[Row]:
    """Prefill of the 8B shape."""
    card = measure_card(device)
    passes = _passes(_llama(), device, max(CHUNKS) // BLOCK_SIZE, [1])
    for chunk in CHUNKS:
        yield check_prefill(card, passes, chunk)


Part = Callable[[torch.device], Iterator[Row]]
PARTS: dict[str, Part] = {
    "limits": limits,
    "build": build,
    "exactness": exactness,
    "logits": logits,
    "decode": decode,
    "ahead": ahead,
    "prefill": prefill,
    "peer": peer,
    "split": split,
}


def _llama(num_layers: int = 32) -> ModelConfig:
    keys = LLAMA_8B | {"num_hidden_layers": num_layers}
    return parse_model_config(JsonKeys(keys, "bench.gpu"))


def _passes(config: ModelConfig, device: torch.device, num_blocks: int, sizes: list[int]) -> Passes:
    """The shape with FlashInfer and graphs; FlashInferUnavailable where it cannot be had."""
    backend = CardBackend(config, device, torch.bfloat16, torch.bfloat16)
    model = random_model(config, device, backend.ops())
    pool = KvPool(config.kv_layout("bench", BLOCK_SIZE, "bfloat16"), num_blocks, device)
    pool.tensor.normal_()
    most_blocks = max(sizes) * max(CONTEXTS) // BLOCK_SIZE
    make_attention = backend.fixed_decodes(pool, max(sizes), most_blocks)
    graphs = DecodeGraphs(model, make_attention, sizes, CudaCapture())
    return Passes(model, pool, backend.attention(pool), graphs.logits, graphs)


if __name__ == "__main__":
    sys.exit(main())
