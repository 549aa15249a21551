"""Breakdown of the time of a CPU engine's step, by Linux's `perf`.

    python -m bench.step_profile --model M1 [--threads 1] [--seconds 5] [--attention torch]

Each work of `bench.engine` is repeated while `perf record` samples this process by CPU time. It
samples only timed work, not the prompts of decode steps. Samples are grouped by their symbol or
library. Needs `perf`, and the permission to sample your own processes.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NoReturn

import torch
from rich.console import Console
from rich.table import Table

from bench.engine.in_process import BatonRun, EngineKind, load_ours
from bench.engine.workloads import WORKS, Work
from bench.tools.checkpoints import SHAPES, benchmark_checkpoint
from bench.tools.records import add_record_option, keep_table
from protocol.errors import BatonError

LINEAR, ATTENTION, BETWEEN = "linear", "attention", "norms, rotary, gate"
WAITING, TORCH, PYTHON, OTHER = "waiting", "torch", "Python", "other"
PARTS = (LINEAR, ATTENTION, BETWEEN, WAITING, TORCH, PYTHON, OTHER)
_SYMBOLS = {
    LINEAR: (
        *("multiply_panel", "multiply_group", "multiply_some"),
        *("_item", "finish_panel", "finish_row", "tiled_rows", "sum_block", "LeftTiles"),
        *("streamed_rows", "shared_rows", "unpacked_rows", "LeftRows"),
        *("TiledWorker", "VectorWorker", "run_step"),
        *("baton::linear", "sum_wide", "sum_square", "brgemm", "gemm", "jit_"),
    ),
    ATTENTION: (
        *("multiply_block", "multiply_rows", "baton::multiply<"),
        *("attend", "soften", "pack_keys", "pack_values", "pack_query", "transpose_words"),
        *("score_", "weigh_", "copy_", "read_wide", "FewGroups"),
        *("merge_splits", "finish_head", "write_token", "write_split", "carve", "plan_attention"),
    ),
    BETWEEN: ("run_layer", "finish_layer", "normalize", "rotate", "gate_row", "rms_norm"),
}
_LIBRARIES = {
    "libgomp": WAITING,
    "libtorch": TORCH,
    "libc10": TORCH,
    "libpython": PYTHON,
    "python": PYTHON,
    "_umath": PYTHON,
    "_multiarray": PYTHON,
}
_ANSWER_S = 10.0


def part_of(library: str, symbol: str) -> str:
    """The part of a step that a sample belongs to. Symbols are more precise than libraries, except
    Python's."""
    owner = next((part for name, part in _LIBRARIES.items() if library.startswith(name)), OTHER)
    if owner == PYTHON:
        return owner
    for part, pieces in _SYMBOLS.items():
        if any(each in symbol for each in pieces):
            return part
    return owner


def shares(report: str) -> dict[str, float]:
    """Per cent by part, from the output of `perf report --field-separator=;`."""
    found: dict[str, float] = defaultdict(float)
    for line in report.splitlines():
        fields = [each.strip() for each in line.split(";")]
        if len(fields) >= 3 and fields[0].endswith("%"):
            found[part_of(fields[1], fields[2])] += float(fields[0].rstrip("%"))
    return found


class Sampler:
    """`perf record` of this process, by CPU time, only within `on`.

    Raises BatonError if perf is missing or may not sample.
    """

    def __init__(self, folder: Path) -> None:
        self._data = folder / "perf.data"
        self._said = folder / "perf.log"
        fifos = [folder / name for name in ("control", "answers")]
        for fifo in fifos:
            os.mkfifo(fifo)
        command = ["perf", "record", "-F", "1999", "-e", "cpu-clock", "-o", str(self._data)]
        command += ["--delay=-1", f"--control=fifo:{fifos[0]},{fifos[1]}", "-p", str(os.getpid())]
        ends = [os.open(fifo, os.O_RDWR) for fifo in fifos]  # O_RDWR: opening does not block
        self._control, self._answers = ends
        with self._said.open("w") as log:
            self._perf = subprocess.Popen(command, stdout=log, stderr=log)

    @contextmanager
    def on(self) -> Iterator[None]:
        """A context in which samples are taken."""
        self._send_command("enable")
        try:
            yield
        finally:
            self._send_command("disable")

    def end(self) -> dict[str, float]:
        """Per cent by part."""
        self._perf.send_signal(signal.SIGINT)
        self._perf.wait()
        os.close(self._control)
        os.close(self._answers)
        if not self._data.exists():
            self._fail()
        command = ["perf", "report", "-i", str(self._data), "--stdio", "--sort=dso,symbol"]
        command += ["--field-separator=;"]
        return shares(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    def _send_command(self, command: str) -> None:
        os.write(self._control, f"{command}\n".encode())
        if not select.select([self._answers], [], [], _ANSWER_S)[0]:
            self._fail()
        os.read(self._answers, 64)

    def _fail(self) -> NoReturn:
        raise BatonError(f"perf cannot sample: {self._said.read_text().strip()[-300:]}")


def profile(run: BatonRun, work: Work, seconds: float) -> tuple[float, dict[str, float]]:
    """Median milliseconds of a prompt or a decode step, and the per cent of each part."""
    rng = random.Random(work.label)
    run.measure(work, rng)
    num_tokens = work.length if work.kind == "prefill" else work.batch
    took_s = []
    with tempfile.TemporaryDirectory() as folder:
        sampler = Sampler(Path(folder))
        run.timed = sampler.on
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            took_s.append(num_tokens / run.measure(work, rng))
        run.timed = nullcontext
        return statistics.median(took_s) * 1e3, sampler.end()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.step_profile", description=__doc__)
    parser.add_argument("--model", default="M1", help="M1, M2, M4 or a checkpoint's folder")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--attention", default="auto", choices=("auto", "kernel", "torch"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each kind of step")
    add_record_option(parser)
    return parser.parse_args()


def main() -> int:
    """Print the table; 1, with a line that says why, if there is none."""
    options = parse()
    if shutil.which("perf") is None:
        print("bench.step_profile: there is no `perf` here (Linux's linux-perf)", file=sys.stderr)
        return 1
    torch.set_num_threads(options.threads)
    options.device = "cpu"
    folder = benchmark_checkpoint(options.model) if options.model in SHAPES else Path(options.model)
    table = Table(title=f"{options.model}, {options.threads} threads, shares of CPU time")
    for name in ("step", "ms", *PARTS):
        table.add_column(name, justify="right")
    try:
        run = BatonRun(load_ours(folder, options, EngineKind(options.attention), WORKS))
        for work in WORKS:
            milliseconds, found = profile(run, work, options.seconds)
            parts = (f"{found[part]:.1f} %" for part in PARTS)
            table.add_row(work.label, f"{milliseconds:.1f}", *parts)
    except BatonError as error:
        print(f"bench.step_profile: {error}", file=sys.stderr)
        return 1
    Console(width=120).print(table)
    keep_table(options.record, f"step_profile {folder.name}", table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
