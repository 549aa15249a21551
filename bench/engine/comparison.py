"""Tokens per second of Baton's engine and of its peers, on the same checkpoint in one run.

    python -m bench.engine --model M1|M2|M4|FOLDER|FILE.gguf [--format Q8_0]
        [--peers llama.cpp,ik_llama.cpp,vllm,transformers,openvino] [--peer-python vllm=PYTHON]
        [--threads 2] [--repeat 3] [--only "decode 8"]
        [--sweep | --served] [--record FILE]

Prefill of 512 and 2,048 tokens, decode at batch 1, 8 and 32 with 512 tokens of context; with
`--sweep`, decode at batch 8 as the context grows to 8,192. Each figure is the median of the
repeats, with their spread. Contestants take turns (ours, theirs, the machine's limits, ours, ...),
so that drift of the machine's speed affects all alike; a ratio is the median of the turns' ratios.
M1, M2 and M4 are made on first use (see bench.tools.checkpoints). If the checkpoint is a GGUF file,
llama.cpp and ik_llama.cpp read the same file; `--format` makes one with quantized weights and gives
it to all contestants. The program installs no packages: it names a missing peer and how to get it.
Each peer runs in its own process (see bench.engine.peer_process). `--attention kernel,torch` or
`--activations auto,int8` compare our own engines, each of them with each peer. `--served` compares
servers as their users run them, over HTTP: `baton up` with one decode worker, and `vllm serve` (see
bench.engine.served).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import platform
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.engine.in_process import BatonRun, Bookkeeping, EngineKind, PeerRun, load_ours
from bench.engine.limits import MachineLimits, StepNeeds, bits_per_weight, step_needs
from bench.engine.peer_process import PeerProcess, installed_peers, interpreters
from bench.engine.plot import plot_side_by_side, plot_sweep
from bench.engine.served import STREAM_TOKENS, ServedRun
from bench.engine.server_process import VLLM_BLOCK_SIZE, Server, baton_command, vllm_command
from bench.engine.workloads import (
    DECODE_STEPS,
    PREFILL_LENGTHS,
    SWEEP,
    SWEEP_BATCH,
    WORKS,
    EngineNeeds,
    Run,
    Work,
    longest,
)
from bench.tools.checkpoints import SHAPES, add_tokenizer, benchmark_checkpoint
from bench.tools.gguf_conversion import write_gguf
from bench.tools.gguf_formats import FORMATS, folder_in_format
from bench.tools.paths import DEMO_MODEL
from bench.tools.records import add_record_option, keep_table
from checkpoint.gguf.folder import gguf_folder
from checkpoint.model_source import resolve_model
from engine.checkpoint.config import load_model_config
from engine.checkpoint.model_config import ModelConfig
from protocol.errors import BatonError

Figures = dict[Work, dict[str, list[float]]]


def measure(
    works: list[Work], runs: Mapping[str, Run], repeat: int, limits: MachineLimits | None
) -> Figures:
    """Run every work with every contestant in turn, in tokens/s, and measure the limits after each
    work, so that drift of the machine's speed affects all of them."""
    figures: Figures = {work: {name: [] for name in runs} for work in works}
    for turn in range(repeat + 1):
        for work in works:
            for name, run in runs.items():
                # A seed per work and turn: a prompt that shares a prefix would hit the cache
                figure = run(work, random.Random(f"{work.label}, {turn}"))
                if turn > 0:  # the first turn warms up
                    figures[work][name].append(figure)
            if limits is not None:
                limits.measure()
    return figures


def report(
    figures: Figures,
    needs: StepNeeds,
    limits: MachineLimits | None,
    bookkeeping: Bookkeeping,
    num_ours: int = 1,
) -> Table:
    """Medians with least and most; ratios, as the median of the turns' ratios (a slow turn slows
    down both); the first contestant's share of the limit.

    The first `num_ours` contestants are our engines: each has a ratio to each peer, and where there
    are no peers, the first one has a ratio to each of the others.
    """
    names = list(next(iter(figures.values())))
    first, ours, peers = names[0], names[:num_ours], names[num_ours:]
    pairs = list(itertools.product(ours, peers)) or [(first, other) for other in ours[1:]]
    columns = [f"{name} tokens/s" for name in names]
    columns += [f"over {b}" if a == first else f"{a} over {b}" for a, b in pairs]
    table = Table("work", *columns, "share of limit", "bookkeeping")
    for work, by_name in figures.items():
        medians = {name: statistics.median(values) for name, values in by_name.items()}
        cells = [
            f"{medians[name]:,.0f} ({min(values):,.0f}-{max(values):,.0f})"
            for name, values in by_name.items()
        ]
        ratios = (_ratio(by_name[a], by_name[b]) for a, b in pairs)
        cells += [f"{ratio:.2f}x" for ratio in ratios]
        cells.append("" if limits is None else _share(work, medians[first], needs, limits))
        kept = bookkeeping.get(work)
        cells.append(f"{statistics.median(kept):.1%}" if kept else "")
        table.add_row(work.label, *cells)
    return table


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _share(work: Work, tokens_per_s: float, needs: StepNeeds, limits: MachineLimits) -> str:
    """Our share of the limit: arithmetic for prefill, bandwidth for decode."""
    if work.kind == "prefill":
        flops = needs.prefill_flops(work.length) * tokens_per_s / work.length
        return f"{flops / limits.flops_per_s:.0%} of FLOP/s"
    streamed = needs.decode_bytes(work.batch, work.length) * tokens_per_s / work.batch
    return f"{streamed / limits.bytes_per_s:.0%} of bytes/s"


def chosen(works: list[Work], only: list[str] | None) -> list[Work]:
    """The works whose labels begin with one of `only`, in whole words; all if it is None. Raises
    BatonError if there are none."""
    found = [
        work
        for work in works
        if only is None or any(f"{work.label} ".startswith(f"{begin} ") for begin in only)
    ]
    if not found:
        labels = ", ".join(f'"{work.label}"' for work in works)
        raise BatonError(f"--only leaves nothing to measure; there are {labels}")
    return found


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    default = str(DEMO_MODEL)
    parser.add_argument(
        "--model", default=default, help="M1, M2, M4, a checkpoint's folder, or a GGUF file"
    )
    parser.add_argument("--format", choices=FORMATS, help="of the weights, in a file made for it")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (ours only)")
    parser.add_argument("--attention", default="auto", help="auto, kernel, torch, or several")
    parser.add_argument(
        "--weights", default="auto", help="auto, exact16, exact12, int8, int4, or several"
    )
    parser.add_argument("--activations", default="auto", help="auto, int8, or several")
    parser.add_argument("--kv-dtype", default="auto", help="auto, fp8, or several")
    parser.add_argument("--kv-order", default="auto", help="auto, pairs, tokens, or several")
    parser.add_argument("--block-size", default="16", help="tokens of a block, or several sizes")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's choice)")
    parser.add_argument("--repeat", type=int, default=3, help="counted repeats (default: 3)")
    parser.add_argument(
        "--only", action="append", metavar="WORK", help='works that begin so: prefill, "decode 8"'
    )
    parser.add_argument(
        "--peers", help="comma-separated; '' for none; default: transformers, served: vllm"
    )
    parser.add_argument("--peer-python", action="append", default=[], help="NAME=PYTHON")
    parser.add_argument("--plot", type=Path, help="write a picture here")
    parser.add_argument("--sweep", action="store_true", help="decode as the context grows")
    parser.add_argument("--served", action="store_true", help="servers, over HTTP")
    add_record_option(parser)
    return parser.parse_args()


@dataclass(frozen=True)
class Subject:
    """The checkpoint and the works of all contestants; they compute in `dtype`."""

    folder: Path
    config: ModelConfig
    dtype: str
    works: list[Work]

    def needs(self, steps: int) -> EngineNeeds:
        """The needs of an engine that runs `steps` decode steps after each prompt."""
        return EngineNeeds(
            folder=self.folder,
            dtype=self.dtype,
            threads=torch.get_num_threads(),
            max_context=longest(self.works, steps),
            max_sequences=max(work.batch for work in self.works),
            num_tokens=max(work.num_tokens(VLLM_BLOCK_SIZE, steps) for work in self.works),
            kv_bytes_per_token=step_needs(self.config).kv_bytes_per_token,
            step_tokens=max(PREFILL_LENGTHS),
        )


@dataclass(frozen=True)
class Contest:
    """The contestants, ours first, and their versions."""

    runs: Mapping[str, Run]
    versions: list[str]
    bookkeeping: Bookkeeping
    num_ours: int = 1


def _engine_flags(options: argparse.Namespace) -> EngineKind:
    """The flags that choose engines; each may name several values."""
    return EngineKind(*(getattr(options, name) for name in EngineKind._fields))


def _in_process(
    options: argparse.Namespace,
    subject: Subject,
    peers: dict[str, str],
    stack: contextlib.ExitStack,
) -> Contest:
    """Our engine in this process, each peer's in its own. `peers`: their interpreters."""
    folder, works = subject.folder, subject.works
    kinds = itertools.product(*(names.split(",") for names in _engine_flags(options)))
    ours = {
        kind.label: BatonRun(load_ours(folder, options, kind, works))
        for kind in itertools.starmap(EngineKind, kinds)
    }
    runs: dict[str, Run] = {name: run.measure for name, run in ours.items()}
    versions = [f"torch {torch.__version__}"]
    needs = subject.needs(DECODE_STEPS)
    for name, python in peers.items():
        process = stack.enter_context(PeerProcess(name, python, needs))
        versions.append(process.version)
        runs[name] = PeerRun(process).measure
    return Contest(runs, versions, next(iter(ours.values())).bookkeeping, len(ours))


def _served(
    options: argparse.Namespace,
    subject: Subject,
    peers: dict[str, str],
    stack: contextlib.ExitStack,
) -> Contest:
    """Our server and the peer's, both stopped."""
    if options.model in SHAPES:
        add_tokenizer(subject.folder)
    needs = subject.needs(STREAM_TOKENS)
    commands = [baton_command(needs)]
    commands += [vllm_command(needs, python) for python in peers.values()]
    servers = [stack.enter_context(Server(command, needs)) for command in commands]
    runs: dict[str, Run] = {
        server.name: ServedRun(server, subject.config.vocab_size).measure for server in servers
    }
    return Contest(runs, [server.version for server in servers], {})


def _compare(options: argparse.Namespace, console: Console) -> None:
    pythons = interpreters(options.peer_python)
    names, missing = installed_peers(_wanted(options), pythons)
    peers = {name: pythons[name] for name in names}
    for line in missing:
        console.print(line, soft_wrap=True, markup=False)
    works = chosen(SWEEP if options.sweep else WORKS, options.only)
    start = _served if options.served else _in_process
    with contextlib.ExitStack() as stack:
        folder = _checkpoint(options, stack)
        config = load_model_config(folder)
        dtype = config.dtype if options.dtype == "auto" else options.dtype
        subject = Subject(folder, config, dtype, works)
        limits = MachineLimits() if (options.device, dtype) == ("cpu", "bfloat16") else None
        bits = bits_per_weight(folder)
        contest = start(options, subject, peers, stack)
        figures = measure(subject.works, contest.runs, options.repeat, limits)
    console.print(
        f"{options.model}, {dtype}, {options.device}, {torch.get_num_threads()} threads, "
        f"{platform.machine()}{', over HTTP' if options.served else ''}; "
        f"{'; '.join(contest.versions)}",
        soft_wrap=True,
    )
    needs = step_needs(config, bits)
    table = report(figures, needs, limits, contest.bookkeeping, contest.num_ours)
    console.print(table)
    keep_table(options.record, _table_name(options), table)
    if limits is not None:
        console.print(
            f"limits in this run: {limits.bytes_per_s / 1e9:.1f} GB/s by a prepacked "
            f"matrix-vector product ({limits.fastest_stream}), {limits.flops_per_s / 1e12:.2f} "
            f"TFLOP/s by a large product ({limits.fastest_product}); shares count weights in the "
            f"checkpoint's bits ({bits:.2f} each)"
        )
    if options.plot is not None:
        _plot(options, figures, needs, limits)


def _checkpoint(options: argparse.Namespace, stack: contextlib.ExitStack) -> Path:
    """The folder of the checkpoint. A file in `--format` is made once of M1, M2 or M4, and of any
    other model for as long as `stack` is open. Raises BatonError."""
    is_made = options.model in SHAPES
    folder = benchmark_checkpoint(options.model) if is_made else resolve_model(options.model)
    if options.format is None:
        return folder
    if is_made:
        file = folder.with_name(f"{options.model}-{options.format}.gguf")
        write_gguf(folder, file, options.format)
        return gguf_folder(file)
    place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    return folder_in_format(options.model, options.format, place)


def _table_name(options: argparse.Namespace) -> str:
    kind = "" if options.format is None else f" {options.format}"
    kind += " served" if options.served else " sweep" if options.sweep else ""
    return f"engine {Path(options.model).name.removesuffix('.gguf')}{kind}"


def _wanted(options: argparse.Namespace) -> str:
    """The peers to look for. Raises BatonError for options that `--served` does not support."""
    if not options.served:
        return "transformers" if options.peers is None else options.peers
    if (options.sweep, options.device, _engine_flags(options)) != (False, "cpu", EngineKind()):
        raise BatonError("--served takes none of the flags that choose engines, and no --sweep")
    if options.peers not in (None, "", "vllm"):
        raise BatonError("the only peer of --served is vllm")
    return "vllm" if options.peers is None else options.peers


def _plot(
    options: argparse.Namespace, figures: Figures, needs: StepNeeds, limits: MachineLimits | None
) -> None:
    by_label = {work.label: by_name for work, by_name in figures.items()}
    if not options.sweep:
        plot_side_by_side(options.model, by_label, options.plot)
    elif limits is None:
        raise BatonError("--plot of a sweep needs the machine's limits: bfloat16 on a CPU")
    else:
        sizes = [needs.decode_bytes(work.batch, work.length) for work in figures]
        title = f"{options.model}: decode at batch {SWEEP_BATCH} as the context grows"
        plot_sweep(title, by_label, SWEEP_BATCH, sizes, limits.bytes_per_s, options.plot)


def main() -> int:
    """The command line. On a signal to end, it first ends the processes that it has stopped."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    options = _parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        _compare(options, Console(width=max(Console().width, 120)))
    except BatonError as error:
        print(f"bench.engine: {error}", file=sys.stderr)
        return 2
    return 0
