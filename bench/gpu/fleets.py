"""Fleets of real processes that share one card.

- Long prompts arrive among streams (bench.interference): whole, chunked and apart; and apart
  without CUDA's MPS, with MPS, and with MPS and a part of the multiprocessors each. Each fleet is
  first measured undisturbed.
- Prefill and decode apart, one request at a time: their tokens compared with one worker's, and the
  cost of a handoff, from the router's traces.

Needs the packages of workers and routers besides the engine's, and built kernels: run bench.gpu's
part `build` first, or the start may exceed the fleet's time limit.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.gpu.card import BLOCK_SIZE, Card, Row, attention_of
from bench.gpu.models import first_difference
from bench.interference import Contestant, Result, contestants, quantile, run_contestant
from bench.tools.fleet import BenchFleet, FleetConfig
from bench.tools.stream_load import StreamLoad
from engine.checkpoint.config import load_model_config
from process.cores import usable_cores
from protocol.errors import BatonError

_CONTROL = "nvidia-cuda-mps-control"
_CONTROL_S = 30.0
_WARM_UP = 2
_TIMEOUT_S = 120.0
_TRACE_WAIT_S = 60.0


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


@dataclass(frozen=True)
class SplitLoad:
    """Requests, sent one after the other; the first two only warm up."""

    num_prompt: int = 8192
    num_requests: int = 22
    num_output: int = 16
    chunk: int = 2048


@dataclass(frozen=True)
class Handoff:
    """One request's handoff from the prefill to the decode worker."""

    ms: float  # last chunk done to first decode step
    exposed_ms: float  # last chunk done to last block written
    bytes_per_s: float  # while any write was under way


def check_split(card: Card, folder: Path, load: SplitLoad) -> Iterator[Row]:
    """Compare the tokens of one worker and of two, and measure the handoffs of the two."""
    device = str(card.device)
    expected, _ = _serve(device, folder, load, num_prefill=0)
    tokens, traces = _serve(device, folder, load, num_prefill=1)
    parted = [first_difference(*pair) for pair in zip(tokens, expected, strict=True)]
    differing = [f"prompt {i} from token {at}" for i, at in enumerate(parted) if at is not None]
    note = ", ".join([str(load), *differing[:3]])
    same = len(expected) - len(differing)
    yield Row("split", "equal to one worker's", same, "prompts", f"= {len(expected)}", note)
    handoffs = [handoff_of(trace) for trace in traces[_WARM_UP:]]
    note = f"{len(handoffs)} prompts of {load.num_prompt}, by {traces[-1]['transport']}"
    p50 = statistics.median(each.ms for each in handoffs)
    yield Row("split", "handoff p50", p50, "ms", "< 3", note)
    exposed = statistics.median(each.exposed_ms for each in handoffs)
    yield Row("split", "transfer after the last chunk, p50", exposed, "ms")
    rate = statistics.median(each.bytes_per_s for each in handoffs)
    yield Row("split", "rate of writes, p50", rate / 1e9, "GB/s")
    share = 200 * rate / card.copy_bytes_per_s  # a copy reads and writes
    yield Row("split", "writes, of what a copy on the card moves", share, "% of copy")


def handoff_of(trace: dict[str, Any]) -> Handoff:
    """The handoff of the last attempt in a trace from `/requests/{id}/trace`."""
    prefill = trace["attempts"][-1]["prefill"]
    _, last_chunk_us, _ = prefill["chunks"][-1]  # spans are arrays: see protocol.messages
    writes = sorted((posted_us, done_us) for posted_us, done_us, *_ in prefill["writes"])
    busy_us, until_us = 0, 0
    for posted_us, done_us in writes:
        busy_us += max(0, done_us - max(posted_us, until_us))
        until_us = max(until_us, done_us)
    return Handoff(
        ms=trace["handoff_ms"],
        exposed_ms=max(0, until_us - last_chunk_us) / 1e3,
        bytes_per_s=prefill["bytes_moved"] / max(busy_us, 1) * 1e6,
    )


def _serve(
    device: str, folder: Path, load: SplitLoad, num_prefill: int
) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """The tokens of every request, and their traces. Raises BatonError."""
    context = load.num_prompt + load.num_output
    flags = (
        f"--device={device}",
        f"--chunk-min-tokens={load.chunk}",  # the same chunks on both sides: the same rounding
        f"--chunk-max-tokens={load.chunk}",
        f"--num-blocks={4 * (-(-context // BLOCK_SIZE) + 1)}",
        f"--attention={attention_of(device)}",
    )
    config = FleetConfig(str(folder), 1, num_prefill, 1, worker_flags=flags)
    generator = torch.Generator().manual_seed(0)
    vocab_size = load_model_config(folder).vocab_size
    shape = (load.num_requests, load.num_prompt)
    prompts = torch.randint(10, vocab_size, shape, generator=generator).tolist()
    tokens, traces = [], []
    with BenchFleet(config) as fleet:
        for prompt in prompts:
            answer = complete(fleet.url("router-1"), folder.name, prompt, load.num_output)
            tokens.append(answer["choices"][0]["token_ids"])
            if num_prefill:
                traces.append(_trace(fleet.url("router-1"), answer["id"]))
    return tokens, traces


def complete(url: str, model: str, prompt: list[int], num_output: int) -> dict[str, Any]:
    """A router's answer to a greedy completion, with its tokens."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_output,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    return _json(request)


def _trace(url: str, request_id: str) -> dict[str, Any]:
    """The trace, once the prefill worker has reported all writes. Raises BatonError."""
    deadline = time.monotonic() + _TRACE_WAIT_S
    while time.monotonic() < deadline:
        trace = _json(f"{url}/requests/{request_id}/trace")
        is_ended = trace["outcome"] != "running"
        if is_ended and trace["blocks_moved"] * BLOCK_SIZE >= trace["num_prompt_tokens"]:
            return trace
        time.sleep(0.01)
    raise BatonError(f"{request_id} was not handed over: {trace['attempts']}")


def _json(request: urllib.request.Request | str) -> dict[str, Any]:
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
        loaded: dict[str, Any] = json.load(answer)
    return loaded
