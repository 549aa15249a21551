"""Prefill and decode as two processes on one device: their tokens compared with one worker's, and
the cost of a handoff, from the router's traces.

Real processes over HTTP, one request at a time. The fleet needs its kernels built: run bench.gpu's
part `build` first, or the start may exceed the fleet's time limit.
"""

from __future__ import annotations

import json
import statistics
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.gpu.checks import BLOCK_SIZE, Card, Row, attention_of
from bench.gpu.exactness import first_difference
from bench.tools.fleet import BenchFleet, FleetConfig
from engine.checkpoint.config import load_model_config
from protocol.errors import BatonError

_WARM_UP = 2
_TIMEOUT_S = 120.0
_TRACE_WAIT_S = 60.0


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
            answer = _complete(fleet.url("router-1"), folder.name, prompt, load.num_output)
            tokens.append(answer["choices"][0]["token_ids"])
            if num_prefill:
                traces.append(_trace(fleet.url("router-1"), answer["id"]))
    return tokens, traces


def _complete(url: str, model: str, prompt: list[int], num_output: int) -> dict[str, Any]:
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
