"""Fleets that share one card, with long prompts arriving among streams (bench.interference):
whole, chunked and apart; and apart without CUDA's MPS, with MPS, and with MPS and a part of the
multiprocessors each.

Needs the packages of workers and routers besides the engine's. Each fleet is first measured
undisturbed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench.gpu.checks import Row, attention_of
from bench.interference import Contestant, Result, contestants, quantile, run_contestant
from bench.tools.stream_load import StreamLoad
from engine.checkpoint.config import load_model_config
from process.cores import usable_cores

_CONTROL = "nvidia-cuda-mps-control"
_CONTROL_S = 30.0


@dataclass(frozen=True)
class FleetLoad:
    """Few streams, because their client is one process; prompts that take a card some time."""

    num_streams: int = 8
    stream_tokens: int = 512
    long_prompt: int = 8192
    arrivals_per_s: float = 6.0
    itl_target_ms: float = 10.0
    seconds: float = 30.0

    def streams(self, folder: Path) -> StreamLoad:
        """The load in the client's form."""
        return StreamLoad(
            model=folder.name,
            vocab_size=load_model_config(folder).vocab_size,
            num_streams=self.num_streams,
            stream_tokens=self.stream_tokens,
            long_prompt=self.long_prompt,
            arrivals_per_s=self.arrivals_per_s,
        )

    def fleets(self, device: str) -> list[Contestant]:
        """The fleets: whole, chunked, apart."""
        cores = usable_cores()
        fleets = contestants(
            cores, self.long_prompt + StreamLoad.stream_prompt, self.itl_target_ms, device
        )
        flag = f"--attention={attention_of(device)}"
        return [replace(fleet, flags=(*fleet.flags, flag)) for fleet in fleets]


def check_interference(device: str, folder: Path, load: FleetLoad) -> Iterator[Row]:
    """Measure the three fleets one after the other."""
    for contestant in load.fleets(device):
        yield from _rows("interference", contestant, folder, load)


def check_share(device: str, folder: Path, load: FleetLoad) -> Iterator[Row]:
    """Prefill and decode apart: by time slices, concurrently, and concurrently on half of the
    multiprocessors each."""
    apart = load.fleets(device)[-1]
    if shutil.which(_CONTROL) is None:
        yield Row("share", f"{_CONTROL} is not there", 0.0, "skipped")
        return
    yield from _rows("share", _renamed(apart, "apart, without MPS"), folder, load)
    with _mps():
        yield from _rows("share", _renamed(apart, "apart, MPS"), folder, load)
        halves = _renamed(apart, "apart, MPS, half each", "--sm-fraction=0.5")
        yield from _rows("share", halves, folder, load)


def fleet_rows(part: str, result: Result) -> Iterator[Row]:
    """The latencies and rates of one fleet's streams and prompts."""
    label = result.contestant.label
    quiet, gaps, ttft = result.gaps_ms(False), result.gaps_ms(True), result.ttft_ms()
    note = f"undisturbed {quantile(quiet, 0.5):.2f} / {quantile(quiet, 0.99):.2f} (p50 / p99)"
    yield Row(part, f"{label}: between tokens, p50", quantile(gaps, 0.5), "ms", note=note)
    p99 = quantile(gaps, 0.99)
    yield Row(part, f"{label}: between tokens, p99", p99, "ms")
    yield Row(part, f"{label}: p99 over undisturbed", p99 / quantile(quiet, 0.99), "x")
    note = f"{len(ttft)} prompts, p50 {quantile(ttft, 0.5):.0f} ms"
    yield Row(
        part, f"{label}: first token of a long prompt, p99", quantile(ttft, 0.99), "ms", "", note
    )
    rates = f"{result.rate('prompt_tokens'):,.0f} of prompts"
    yield Row(part, f"{label}: streams", result.rate("stream_tokens"), "tokens/s", note=rates)


def _rows(part: str, contestant: Contestant, folder: Path, load: FleetLoad) -> Iterator[Row]:
    turn = run_contestant(contestant, str(folder), load.streams(folder), load.seconds)
    yield from fleet_rows(part, Result(contestant, [turn]))


def _renamed(contestant: Contestant, label: str, *flags: str) -> Contestant:
    return replace(contestant, label=label, flags=(*contestant.flags, *flags))


@contextmanager
def _mps() -> Iterator[None]:
    """A context with an MPS daemon for the processes started within it."""
    with tempfile.TemporaryDirectory(prefix="baton-mps-") as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        os.environ.update(places)
        try:
            subprocess.run([_CONTROL, "-d"], check=True, timeout=_CONTROL_S)
            yield
        finally:
            subprocess.run([_CONTROL], input=b"quit\n", check=False, timeout=_CONTROL_S)
            for name in places:
                del os.environ[name]
